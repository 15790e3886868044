"""Selecting blocks in Triton, after the compressed branch."""

import jax
import jax.numpy as jnp

from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import Branch, SelectedAttention
from ejkernel.ops.device import current_device
from ejkernel.planning.block_selection import diagonal_blocks
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.selected_attention.config import group_size, padded
from ejkernel_triton.selected_attention.spec import LOG2E, make_spec

TILE = (64, 64)
"""Rows of a tile of scores, queries times heads of the group, and its blocks."""
WIDE_TILE = (16, 32)
"""The same in float32, whose products take parts of both operands."""
PROGRAMS_PER_SM = 4
"""As many as registers have room for."""
WEIGHTS = 4096
"""Weights that a program looks through at once."""
MOST_BLOCKS = 16384
"""Blocks whose weights for one query registers have room for; XLA selects among more."""


def select(record: SelectedAttention, compressed: Branch | None) -> jax.Array:
    """The blocks that each query of a record reads, [B, T, Hk, N] int32.

    Beside it, `PROGRAMS_PER_SM` programs a multiprocessor have a float32 for each query of a tile and each block.
    """
    if compressed is None or selected_attention.blocks(record) > MOST_BLOCKS:
        return selected_attention.select(record)
    from ejkernel_triton.selected_attention.select_kernel import select_kernel

    spec = make_spec(record)
    batch = record.query.shape[0]
    heads = 1 << (group_size(record) - 1).bit_length()
    rows, count = WIDE_TILE if record.query.dtype.itemsize > 2 or interpreting() else TILE
    queries = max(1, rows // heads)
    items = -(-spec.T // queries) * spec.HK
    chip = chip_of(current_device())
    programs = 3 if interpreting() else max(1, min(items, PROGRAMS_PER_SM * chip.multiprocessors // batch))
    width = max(count, padded(spec.M))
    shift = compressed.lse.swapaxes(1, 2) * LOG2E
    indices, _ = launch(
        select_kernel,
        (
            record.query,
            record.compressed_key,
            jnp.where(shift == -jnp.inf, 0, shift),
            diagonal_blocks(selected_attention.places(record)),
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
            "BLOCKS": count,
            "BM": width,
            "FEW": max(1, min(queries, WEIGHTS // width)),
        },
    )
    return indices
