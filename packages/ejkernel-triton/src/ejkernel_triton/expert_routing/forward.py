"""Expert routing in Triton: three launches, without atomics."""

from typing import Any

import jax.numpy as jnp

from ejkernel.families.expert_routing import ExpertRouting, Routing
from ejkernel_triton.expert_routing.config import RoutingTiles
from ejkernel_triton.expert_routing.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: ExpertRouting, config: RoutingTiles) -> tuple[Routing, tuple[()]]:
    """Returns the routing of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        Experts, positions of pairs in sorted order, the sorted order, and group sizes. There are no residuals.
    """
    from ejkernel_triton.expert_routing.kernels.expert_offsets import expert_offsets_kernel
    from ejkernel_triton.expert_routing.kernels.sorted_rows import sorted_rows_kernel
    from ejkernel_triton.expert_routing.kernels.topk import topk_kernel

    spec = make_spec(record, config)
    options: dict[str, Any] = {"batch": 1, "num_stages": 1, "constants": {"spec": spec}}
    pairs_shape, counts_shape = ((1, spec.T, spec.K), (1, spec.NUM_BLOCKS, spec.PADDED_E))
    experts, indices_within_block_and_expert, block_counts = launch(
        topk_kernel,
        (record.logits[None],),
        tuple(ShapeDtype(shape, jnp.int32) for shape in (pairs_shape, pairs_shape, counts_shape)),
        grid=spec.NUM_BLOCKS,
        num_warps=config.num_warps,
        **options,
    )
    earlier_block_counts, group_sizes = launch(
        expert_offsets_kernel,
        (block_counts,),
        tuple(ShapeDtype(shape, jnp.int32) for shape in (counts_shape, (1, spec.E))),
        grid=spec.PADDED_E // spec.BLOCK_E,
        num_warps=8,
        **options,
    )
    sorted_positions, sorted_pairs = launch(
        sorted_rows_kernel,
        (experts, indices_within_block_and_expert, earlier_block_counts, group_sizes),
        tuple(ShapeDtype(shape, jnp.int32) for shape in (pairs_shape, (1, spec.T * spec.K))),
        grid=spec.NUM_BLOCKS,
        num_warps=config.num_warps,
        **options,
    )
    return (experts[0], sorted_positions[0], sorted_pairs[0], group_sizes[0]), ()
