"""Computes the first row of every expert; see `topk`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def expert_offsets_kernel(counts, earlier_block_counts, group_sizes, spec: tl.constexpr, per: tl.constexpr):
    """Computes exclusive sums of counts over blocks, BLOCK_B blocks of BLOCK_E experts at a time, and the group
    sizes.
    """
    B: tl.constexpr = spec.BLOCK_B
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    E: tl.constexpr = spec.PADDED_E
    tile = tl.program_id(0) % (E // BLOCK_E)
    batch = tl.cast(tl.program_id(0) // (E // BLOCK_E), tl.int64)
    counts = batch_row_address(counts, batch, per.COUNTS, spec.NUM_BLOCKS * E)
    earlier_block_counts += batch * spec.NUM_BLOCKS * E
    expert = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    expert_total = tl.full([BLOCK_E], 0, tl.int32)
    for start in tl.range(0, spec.NUM_BLOCKS, B):
        block = start + tl.arange(0, B)
        at = block[:, None] * E + expert[None, :]
        mask = (block < spec.NUM_BLOCKS)[:, None]
        block_counts = tl.load(counts + at, mask=mask, other=0)
        tl.store(
            earlier_block_counts + at, tl.cumsum(block_counts, axis=0) - block_counts + expert_total[None, :], mask=mask
        )
        expert_total += tl.sum(block_counts, axis=0)
    tl.store(group_sizes + batch * spec.E + expert, expert_total, mask=expert < spec.E)
