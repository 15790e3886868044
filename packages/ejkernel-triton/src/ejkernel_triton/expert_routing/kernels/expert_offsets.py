"""Computes the first row of every expert; see `topk`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def expert_offsets_kernel(block_counts, earlier_block_counts, group_sizes, spec: tl.constexpr, per: tl.constexpr):
    """Computes exclusive sums of counts over blocks, BLOCKS_PER_STEP blocks of BLOCK_E experts at a time, and the group
    sizes.
    """
    B: tl.constexpr = spec.BLOCKS_PER_STEP
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    E: tl.constexpr = spec.PADDED_E
    tile = tl.program_id(0) % (E // BLOCK_E)
    batch = tl.cast(tl.program_id(0) // (E // BLOCK_E), tl.int64)
    block_counts = batch_row_address(block_counts, batch, per.BLOCK_COUNTS, spec.NUM_BLOCKS * E)
    earlier_block_counts += batch * spec.NUM_BLOCKS * E
    expert = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    expert_total = tl.full([BLOCK_E], 0, tl.int32)
    for start in tl.range(0, spec.NUM_BLOCKS, B):
        block = start + tl.arange(0, B)
        at = block[:, None] * E + expert[None, :]
        mask = (block < spec.NUM_BLOCKS)[:, None]
        loaded_counts = tl.load(block_counts + at, mask=mask, other=0)
        tl.store(
            earlier_block_counts + at,
            tl.cumsum(loaded_counts, axis=0) - loaded_counts + expert_total[None, :],
            mask=mask,
        )
        expert_total += tl.sum(loaded_counts, axis=0)
    tl.store(group_sizes + batch * spec.E + expert, expert_total, mask=expert < spec.E)
