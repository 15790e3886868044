"""Adds up the partial sums of pools that cross blocks; see `pool_fwd`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch
from ejkernel_triton.segment_pooling.kernels.tile import span_of, tokens_of


@triton.jit
def split_combine_kernel(sums, lengths, ranges, so_far, output, spec: tl.constexpr, per: tl.constexpr):
    """Computes the means of pools that cross blocks, from their sums in block order; 0 for pools without tokens.

    `output` aliases `so_far`, whose other pools are final.
    """
    program = tl.program_id(0)
    tile = program % spec.WIDE_TILES
    pool = program // spec.WIDE_TILES % spec.M
    row = tl.cast(program // (spec.WIDE_TILES * spec.M), tl.int64)
    channels = tile * spec.WIDE + tl.arange(0, spec.WIDE)
    if spec.RANGES:
        ranges = at_batch(ranges, row, per.RANGES, 2 * spec.M)
    first, end = span_of(ranges, pool, tokens_of(lengths, row, spec, per), pool >= 0, spec)
    # Most programs have a pool that crosses no block, and write nothing.
    begins, ends = first // spec.SPAN, (end - 1) // spec.SPAN
    crosses = (end > first) & (ends > begins)
    sums = at_batch(sums, row, per.SUMS, spec.BLOCKS * 2 * spec.C)
    AT_ONCE: tl.constexpr = spec.AT_ONCE
    WIDE: tl.constexpr = spec.WIDE
    blocks = tl.arange(0, AT_ONCE)
    acc = tl.zeros([AT_ONCE, WIDE], tl.float32)
    for block in tl.range(begins, tl.where(crosses, ends + 1, begins), spec.AT_ONCE):
        # Two sums per block: slot 1 is the tail of the block in which the pool starts, slot 0 the head of each later
        # one.
        part = 2 * (block + blocks) + tl.where(block + blocks == begins, 1, 0)
        mask = (block + blocks <= ends)[:, None] & (channels < spec.C)[None, :]
        acc += tl.load(sums + (tl.cast(part, tl.int64)[:, None] * spec.C + channels[None, :]), mask=mask, other=0.0)
    # Empty pools are also stored here: the first kernel misses an empty pool at a block's first token.
    if crosses | (end <= first):
        mean = tl.sum(acc, axis=0) / tl.cast(tl.maximum(end - first, 1), tl.float32)
        at = output + (row * spec.M + pool) * spec.C + channels
        tl.store(at, mean.to(output.dtype.element_ty), mask=channels < spec.C)
