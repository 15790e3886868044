"""Forward pass of selected attention in Triton: the selected branch, and the dense ones by tiled attention."""

import jax
import jax.numpy as jnp

from ejkernel.families.selected_attention import Branch, SelectedAttention, SelectedResiduals
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.selected_attention.compressed import DENSE
from ejkernel_triton.selected_attention.config import SelectedForward
from ejkernel_triton.selected_attention.select import select
from ejkernel_triton.selected_attention.spec import make_spec


def forward(record: SelectedAttention, config: SelectedForward) -> tuple[jax.Array, SelectedResiduals]:
    """Output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages of the selected branch.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    return selected_branches.forward(record, lambda listed: selected(listed, config), select, DENSE)


def operands(record: SelectedAttention) -> tuple[jax.Array | None, ...]:
    """First inputs of kernels with a program a query: query, key, value, lists, block starts, positions, segments."""
    starts = None if record.block_starts is None else record.block_starts[None]
    ids = (record.q_segment_ids, record.kv_segment_ids)
    return (record.query, record.key, record.value, record.block_indices, starts, record.q_positions, *ids)


def selected(record: SelectedAttention, config: SelectedForward) -> Branch:
    """The selected branch of a record whose padding is zeros."""
    from ejkernel_triton.selected_attention.forward_kernel import forward_kernel

    (b, t, h, _), (hk, dv) = record.query.shape, record.value.shape[2:]
    output, lse = launch(
        forward_kernel,
        operands(record),
        [Shape((b, t, h, dv), record.query.dtype), Shape((b, h, t), jnp.float32)],
        batch=b,
        grid=t * hk * b,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": make_spec(record), "BLOCK_KV": config.block_kv},
    )
    return Branch(output=output, lse=lse)
