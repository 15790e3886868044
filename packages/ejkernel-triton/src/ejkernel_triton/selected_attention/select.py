"""Selecting blocks in Triton, after the compressed branch."""

import jax
import jax.numpy as jnp

from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import Branch, SelectedAttention
from ejkernel.families.selected_attention.block_selection import current_blocks
from ejkernel.ops.device import current_device
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.selected_attention.config import group_size, padded
from ejkernel_triton.selected_attention.spec import LOG2E, make_spec

SCORE_TILE = (64, 64)
"""Rows of a tile of scores, queries times heads of the group, and its blocks."""
FLOAT32_SCORE_TILE = (16, 32)
"""SCORE_TILE for float32, whose tf32x3 products split both operands and need more registers."""
PROGRAMS_PER_SM = 4
"""Programs that a multiprocessor's registers hold at once."""
TOPK_WEIGHTS = 4096
"""Weights in a program's registers while it looks for the largest."""
MAX_BLOCKS = 16384
"""Blocks whose weights for one query registers have room for; XLA selects among more."""


def select(record: SelectedAttention, compressed: Branch | None) -> jax.Array:
    """The blocks that each query of a record reads, [B, T, Hk, N] int32.

    Scratch memory: each of the `PROGRAMS_PER_SM` programs a multiprocessor has a float32 for each query of a tile and
    each block.
    """
    if compressed is None or selected_attention.blocks(record) > MAX_BLOCKS:
        return selected_attention.select(record)
    from ejkernel_triton.selected_attention.select_kernel import select_kernel

    spec = make_spec(record)
    batch = record.query.shape[0]
    heads = 1 << (group_size(record) - 1).bit_length()
    rows, block_tile = FLOAT32_SCORE_TILE if record.query.dtype.itemsize > 2 or interpreting() else SCORE_TILE
    queries = max(1, rows // heads)
    items = -(-spec.T // queries) * spec.HK
    chip = chip_of(current_device())
    programs = 3 if interpreting() else max(1, min(items, PROGRAMS_PER_SM * chip.multiprocessors // batch))
    width = max(block_tile, padded(spec.M))
    shift = compressed.lse.swapaxes(1, 2) * LOG2E
    indices, _ = launch(
        select_kernel,
        (
            record.query,
            record.compressed_key,
            jnp.where(shift == -jnp.inf, 0, shift),
            current_blocks(selected_attention.places(record)),
            record.q_segment_ids,
            record.compressed_segment_ids,
        ),
        [Shape((batch, spec.T, spec.HK, spec.SLOTS), jnp.int32), Shape((batch, programs, queries, width), jnp.float32)],
        batch=batch,
        grid=programs * batch,
        num_warps=4,
        num_stages=2,
        constants={
            "spec": spec,
            "PROGRAMS": programs,
            "QUERIES": queries,
            "HEADS": heads,
            "BLOCKS": block_tile,
            "BM": width,
            "TOPK_QUERIES": max(1, min(queries, TOPK_WEIGHTS // width)),
        },
    )
    return indices
