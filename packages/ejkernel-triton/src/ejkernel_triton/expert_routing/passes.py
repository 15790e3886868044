"""Expert routing in Triton: three launches, none with atomics."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.families.expert_routing import ExpertRouting, Routing
from ejkernel_triton.expert_routing.config import RoutingTiles
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.sizes import padded

COUNTS = 4096
"""Counts that a program of `offsets_kernel` adds up at a time, with eight warps."""
BLOCK_E = 8
"""Experts of such a program: with all of them in one program the kernel took 22 us of a layer on an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        E: Experts.
        K: Experts a token.
        PADDED_E: E, padded to a power of two.
        PADDED_K: K, likewise.
        BLOCK_T: Tokens of a program.
        BLOCKS: Programs that share the tokens.
        BLOCK_E: Experts of a program that adds up counts.
        BLOCK_B: Blocks whose counts are added up at a time.
    """

    T: int
    E: int
    K: int
    PADDED_E: int
    PADDED_K: int
    BLOCK_T: int
    BLOCKS: int
    BLOCK_E: int
    BLOCK_B: int


def make_spec(record: ExpertRouting, config: RoutingTiles) -> RoutingSpec:
    """The constants of a record's kernels."""
    (tokens, experts), top_k = record.logits.shape, record.top_k
    blocks = -(-tokens // config.block_t)
    return RoutingSpec(
        T=tokens,
        E=experts,
        K=top_k,
        PADDED_E=padded(experts),
        PADDED_K=padded(top_k),
        BLOCK_T=config.block_t,
        BLOCKS=blocks,
        BLOCK_E=min(BLOCK_E, padded(experts)),
        BLOCK_B=min(padded(blocks), COUNTS // BLOCK_E),
    )


def forward(record: ExpertRouting, config: RoutingTiles) -> tuple[Routing, tuple[()]]:
    """The routing of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        Experts, places, order and sizes. There are no residuals.
    """
    from ejkernel_triton.expert_routing import routing_kernels as kernels

    spec = make_spec(record, config)
    options: dict[str, Any] = {"batch": 1, "num_stages": 1, "constants": {"spec": spec}}
    pairs, counted = ((1, spec.T, spec.K), (1, spec.BLOCKS, spec.PADDED_E))
    experts, ranks, counts = launch(
        kernels.choose_kernel,
        (record.logits[None],),
        tuple(Shape(shape, jnp.int32) for shape in (pairs, pairs, counted)),
        grid=spec.BLOCKS,
        num_warps=config.num_warps,
        **options,
    )
    sums, sizes = launch(
        kernels.offsets_kernel,
        (counts,),
        tuple(Shape(shape, jnp.int32) for shape in (counted, (1, spec.E))),
        grid=spec.PADDED_E // spec.BLOCK_E,
        num_warps=8,
        **options,
    )
    places, order = launch(
        kernels.places_kernel,
        (experts, ranks, sums, sizes),
        tuple(Shape(shape, jnp.int32) for shape in (pairs, (1, spec.T * spec.K))),
        grid=spec.BLOCKS,
        num_warps=config.num_warps,
        **options,
    )
    return (experts[0], places[0], order[0], sizes[0]), ()
