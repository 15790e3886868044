"""Adds up the partial sums of pools that cross blocks; see `pool_fwd`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.segment_pooling.kernels.tile import load_num_tokens, load_pool_range


@triton.jit
def split_combine_kernel(
    head_and_tail_sums, lengths, ranges, first_pass_output, output, spec: tl.constexpr, per: tl.constexpr
):
    """Computes the means of pools that cross blocks, from their sums in block order; 0 for pools without tokens.

    `output` aliases `first_pass_output`, whose other pools are final.
    """
    program = tl.program_id(0)
    tile = program % spec.NUM_COMBINE_CHANNEL_TILES
    pool = program // spec.NUM_COMBINE_CHANNEL_TILES % spec.M
    row = tl.cast(program // (spec.NUM_COMBINE_CHANNEL_TILES * spec.M), tl.int64)
    channels = tile * spec.COMBINE_BLOCK_C + tl.arange(0, spec.COMBINE_BLOCK_C)
    if spec.HAS_RANGES:
        ranges = batch_row_address(ranges, row, per.RANGES, 2 * spec.M)
    first_token, end = load_pool_range(ranges, pool, load_num_tokens(lengths, row, spec, per), pool >= 0, spec)
    # Most programs have a pool that crosses no block, and write nothing.
    first_block, last_block = first_token // spec.TOKENS_PER_BLOCK, (end - 1) // spec.TOKENS_PER_BLOCK
    crosses_blocks = (end > first_token) & (last_block > first_block)
    head_and_tail_sums = batch_row_address(
        head_and_tail_sums, row, per.HEAD_AND_TAIL_SUMS, spec.NUM_BLOCKS * 2 * spec.C
    )
    SUMS_PER_LOAD: tl.constexpr = spec.SUMS_PER_LOAD
    COMBINE_BLOCK_C: tl.constexpr = spec.COMBINE_BLOCK_C
    blocks = tl.arange(0, SUMS_PER_LOAD)
    acc = tl.zeros([SUMS_PER_LOAD, COMBINE_BLOCK_C], tl.float32)
    for block in tl.range(first_block, tl.where(crosses_blocks, last_block + 1, first_block), spec.SUMS_PER_LOAD):
        # Two sums per block: slot 1 is the tail of the block in which the pool starts, slot 0 the head of each later
        # one.
        sum_index = 2 * (block + blocks) + tl.where(block + blocks == first_block, 1, 0)
        mask = (block + blocks <= last_block)[:, None] & (channels < spec.C)[None, :]
        acc += tl.load(
            head_and_tail_sums + (tl.cast(sum_index, tl.int64)[:, None] * spec.C + channels[None, :]),
            mask=mask,
            other=0.0,
        )
    # Empty pools are also stored here: the first kernel misses an empty pool at a block's first token.
    if crosses_blocks | (end <= first_token):
        mean = tl.sum(acc, axis=0) / tl.cast(tl.maximum(end - first_token, 1), tl.float32)
        at = output + (row * spec.M + pool) * spec.C + channels
        tl.store(at, mean.to(output.dtype.element_ty), mask=channels < spec.C)
