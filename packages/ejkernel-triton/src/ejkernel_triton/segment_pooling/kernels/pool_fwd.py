"""Segment pooling: each token is read once, and its gradient is written once; both passes are memory-bound.

    tokens     |------ block 0 ------|------ block 1 ------|------ block 2 ------|
    pools      [ a ][    b    ][          c                                ][ d ]
    pool_fwd       a, b: means         head of c             head of c, d: mean       a program per block and
                   tail of c                                                          tile of channels
    split_combine  c = (tail + head + head) / length                                  a program per pool and tile

Blocks have equal numbers of tokens, for any pool lengths, so programs have equal work. Pools within a block are
completed there. A pool that crosses blocks leaves a float32 partial sum in each: the tail of the block in which it
starts, the heads of later ones. The second kernel adds them in order: without atomics, results are reproducible bit for
bit.

Pools are disjoint and in order, so two searches give the pools of a block, and one search the pool of a token.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.segment_pooling.kernels.tile import (
    count_ended_and_started_pools,
    load_num_tokens,
    load_pool_range,
    load_tokens,
)


@triton.jit
def sum_tokens(values, first_token, end, channels, spec: tl.constexpr):
    """Returns [BLOCK_C] float32, the sum of the tokens from `first_token` up to `end`."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_C: tl.constexpr = spec.BLOCK_C
    # BLOCK_T rows of partial sums: their loads are independent, and one reduction follows the loop.
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if spec.PREFETCHES_TILES:
        # Carried through the loop: the next tile is loaded while this one is added, so that a program always has loads
        # in flight. After the last tile every row is masked.
        tile = load_tokens(values, first_token, end, channels, spec)
        for token in tl.range(first_token, end, spec.BLOCK_T):
            next_tile = load_tokens(values, token + BLOCK_T, end, channels, spec)
            acc += tile.to(tl.float32)
            tile = next_tile
    else:
        for token in tl.range(first_token, end, spec.BLOCK_T):
            acc += load_tokens(values, token, end, channels, spec).to(tl.float32)
    return tl.sum(acc, axis=0)


@triton.jit
def pool_fwd_kernel(values, lengths, ranges, output, head_and_tail_sums, spec: tl.constexpr, per: tl.constexpr):
    """Computes the pools of one block of tokens: means of those within it, sums [NUM_BLOCKS, 2, C] of those that cross
    it.
    """
    program = tl.program_id(0)
    tile = program % spec.NUM_CHANNEL_TILES
    block = program // spec.NUM_CHANNEL_TILES % spec.NUM_BLOCKS
    row = tl.cast(program // (spec.NUM_CHANNEL_TILES * spec.NUM_BLOCKS), tl.int64)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    values = batch_row_address(values, row, per.VALUES, spec.T * spec.C)
    output += row * (spec.M * spec.C)
    head_and_tail_sums += (row * spec.NUM_BLOCKS + block) * (2 * spec.C)
    start, block_end = block * spec.TOKENS_PER_BLOCK, (block + 1) * spec.TOKENS_PER_BLOCK
    tokens = load_num_tokens(lengths, row, spec, per)
    if spec.HAS_RANGES:
        ranges = batch_row_address(ranges, row, per.RANGES, 2 * spec.M)
        # From the first pool that ends after the block's first token to the last that starts before its end.
        first_pool, pools_end = count_ended_and_started_pools(ranges, start, block_end - 1, spec)
    else:
        # The count includes chunks that continue from the previous block or into the next block.
        first_pool, pools_end = (
            start // spec.CHUNK_SIZE,
            tl.minimum((block_end + spec.CHUNK_SIZE - 1) // spec.CHUNK_SIZE, spec.M),
        )
    for m in tl.range(first_pool, pools_end):
        first_token, end = load_pool_range(ranges, m, tokens, m >= 0, spec)
        # Pools are clipped to the block, so that each token is read by one program per tile of channels.
        acc = sum_tokens(values, tl.maximum(first_token, start), tl.minimum(end, block_end), channels, spec)
        channel_mask = channels < spec.C
        # Pools without tokens are complete: their mean is 0 over a length of at least 1.
        is_complete = (end <= first_token) | ((first_token >= start) & (end <= block_end))
        if is_complete:
            mean = acc / tl.cast(tl.maximum(end - first_token, 1), tl.float32)
            tl.store(
                output + tl.cast(m, tl.int64) * spec.C + channels, mean.to(output.dtype.element_ty), mask=channel_mask
            )
        else:
            # A block has at most one pool that continues from the previous block, and one that continues into the next.
            tl.store(head_and_tail_sums + tl.where(first_token >= start, spec.C, 0) + channels, acc, mask=channel_mask)
