"""Forward pass of selected attention in Triton: selects blocks and attends to them; dense branches are tiled
attention.
"""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention, SelectedResiduals
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.families.selected_attention.block_selection import current_blocks
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import ShapeDtype, is_interpreting, launch
from ejkernel_triton.selected_attention.config import SelectedForward, group_size
from ejkernel_triton.selected_attention.plan import DENSE_KERNEL
from ejkernel_triton.selected_attention.spec import make_spec
from ejkernel_triton.sizes import pad_to_dot_size

SCORE_TILE = (64, 64)
"""Rows of a tile of scores (queries times heads of the group), and its blocks."""
FLOAT32_SCORE_TILE = (16, 32)
"""SCORE_TILE for float32, whose tf32x3 products split both operands and need more registers."""
RESIDENT_PROGRAMS_PER_SM = 4
"""Programs per multiprocessor that registers allow."""
TOPK_TILE_ELEMENTS = 4096
"""Weights that a program keeps in registers while it selects the largest."""
MAX_BLOCKS = 16384
"""The largest number of blocks whose weights for one query fit registers; XLA selects among more."""


def forward(record: SelectedAttention, config: SelectedForward) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages of the selected branch.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    return selected_branches.forward(
        record, lambda selected_record: attend_to_selected_blocks(selected_record, config), select_blocks, DENSE_KERNEL
    )


def kernel_inputs(record: SelectedAttention) -> tuple[jax.Array | None, ...]:
    """Returns the first inputs of kernels with one program per query: query, key, value, lists, block starts,
    positions and segments.
    """
    starts = None if record.block_starts is None else record.block_starts[None]
    ids = (record.q_segment_ids, record.kv_segment_ids)
    return (record.query, record.key, record.value, record.block_indices, starts, record.q_positions, *ids)


def attend_to_selected_blocks(record: SelectedAttention, config: SelectedForward) -> BranchResiduals:
    """Returns the selected branch of a record; its padding is zeros."""
    from ejkernel_triton.selected_attention.kernels.selected_fwd import selected_fwd_kernel

    (b, t, h, _), (hk, dv) = record.query.shape, record.value.shape[2:]
    output, lse = launch(
        selected_fwd_kernel,
        kernel_inputs(record),
        [ShapeDtype((b, t, h, dv), record.query.dtype), ShapeDtype((b, h, t), jnp.float32)],
        batch=b,
        grid=t * hk * b,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": make_spec(record), "BLOCK_KV": config.block_kv},
    )
    return BranchResiduals(output=output, lse=lse)


def _resident_programs() -> int:
    """Returns how many programs that select blocks the device holds at a time."""
    return RESIDENT_PROGRAMS_PER_SM * gpu_of(current_device()).multiprocessors


def select_blocks(record: SelectedAttention, compressed_branch: BranchResiduals | None) -> jax.Array:
    """Returns the blocks that each query of a record attends to, [B, T, Hk, N] int32.

    Scratch memory: each of the `RESIDENT_PROGRAMS_PER_SM` programs per multiprocessor has a float32 for each query of
    a tile and each block.
    """
    if compressed_branch is None or selected_attention.num_listable_blocks(record) > MAX_BLOCKS:
        return selected_attention.select(record)
    from ejkernel_triton.selected_attention.kernels.block_topk import block_topk_kernel

    spec = make_spec(record)
    batch = record.query.shape[0]
    heads = 1 << (group_size(record) - 1).bit_length()
    rows, block_tile = FLOAT32_SCORE_TILE if record.query.dtype.itemsize > 2 or is_interpreting() else SCORE_TILE
    queries = max(1, rows // heads)
    num_work_items = cdiv(spec.T, queries) * spec.HK
    programs = 3 if is_interpreting() else max(1, min(num_work_items, _resident_programs() // batch))
    padded_num_blocks = max(block_tile, pad_to_dot_size(spec.M))
    lse_log2 = compressed_branch.lse.swapaxes(1, 2) * LOG2E
    indices, _ = launch(
        block_topk_kernel,
        (
            *(record.query, record.compressed_key, jnp.where(lse_log2 == -jnp.inf, 0, lse_log2)),
            current_blocks(selected_attention.block_positions(record)),
            *(record.q_segment_ids, record.compressed_segment_ids),
        ),
        [
            ShapeDtype((batch, spec.T, spec.HK, spec.NUM_LISTED_BLOCKS), jnp.int32),
            ShapeDtype((batch, programs, queries, padded_num_blocks), jnp.float32),
        ],
        batch=batch,
        grid=programs * batch,
        num_warps=4,
        num_stages=2,
        constants={
            "spec": spec,
            "NUM_PROGRAMS": programs,
            "QUERIES_PER_TILE": queries,
            "HEADS_PER_TILE": heads,
            "BLOCKS_PER_TILE": block_tile,
            "PADDED_NUM_BLOCKS": padded_num_blocks,
            "QUERIES_PER_TOPK": max(1, min(queries, TOPK_TILE_ELEMENTS // padded_num_blocks)),
        },
    )
    return indices
