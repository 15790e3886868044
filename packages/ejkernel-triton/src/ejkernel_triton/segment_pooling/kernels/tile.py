"""Device helpers of the segment pooling kernels: searches for pools, and loads of rows of tokens."""

import triton
import triton.language as tl


@triton.jit
def count_up_to(column, bound, spec: tl.constexpr):
    """Returns the number of pools whose entry in a column of `ranges` is at most `bound`; elementwise for a vector
    of bounds.
    """
    LEVELS: tl.constexpr = spec.LEVELS
    found = bound * 0
    # A binary search without branches, so that a vector of bounds can take every step together. Each step depends on
    # the load of the last one, and there are log2(M) steps.
    for level in tl.static_range(LEVELS):
        step = spec.STEP >> level
        in_range = found + step <= spec.M
        # Ranges are pairs, so entries of a column are 2 apart. Nothing is loaded past the last pool.
        last = tl.load(column + 2 * (found + step - 1), mask=in_range, other=0)
        found = tl.where(in_range & (last <= bound), found + step, found)
    return found


@triton.jit
def pools_between(ranges, start, last, spec: tl.constexpr):
    """Returns the number of pools that end at or before the token `start`, and of those that start at or before
    `last`.
    """
    WAYS: tl.constexpr = spec.WAYS
    WIDE_LEVELS: tl.constexpr = spec.WIDE_LEVELS
    ways = tl.arange(0, WAYS) + 1
    ended, begun = tl.cast(start * 0, tl.int32), tl.cast(start * 0, tl.int32)
    # Each step compares WAYS pools at once, for both columns: a program waits for memory once for up to WAYS pools,
    # twice for WAYS * WAYS, where a binary search would wait log2(M) times.
    for level in tl.static_range(WIDE_LEVELS):
        stride = WAYS ** (WIDE_LEVELS - 1 - level)
        end_at, begin_at = ended + ways * stride - 1, begun + ways * stride - 1
        ends = tl.load(ranges + 2 * end_at + 1, mask=end_at < spec.M, other=0)
        begins = tl.load(ranges + 2 * begin_at, mask=begin_at < spec.M, other=0)
        ended += stride * tl.sum(tl.where((end_at < spec.M) & (ends <= start), 1, 0), axis=0)
        begun += stride * tl.sum(tl.where((begin_at < spec.M) & (begins <= last), 1, 0), axis=0)
    return ended, begun


@triton.jit
def tokens_of(lengths, row, spec: tl.constexpr, per: tl.constexpr):
    """Returns the valid tokens of a row."""
    if spec.LENGTHS:
        return tl.load(lengths + row // per.LENGTHS)
    else:
        return tl.cast(row * 0 + spec.T, tl.int32)


@triton.jit
def span_of(ranges, pool, tokens, in_range, spec: tl.constexpr):
    """Returns the first token of a pool, or of each of a vector of pools, and the token after its last."""
    if spec.RANGES:
        first = tl.load(ranges + 2 * pool, mask=in_range, other=0)
        return first, tl.load(ranges + 2 * pool + 1, mask=in_range, other=0)
    else:
        return tl.minimum(pool * spec.CHUNK, tokens), tl.minimum((pool + 1) * spec.CHUNK, tokens)


@triton.jit
def load_rows(values, token, end, channels, spec: tl.constexpr):
    """Returns [BLOCK_T, BLOCK_C] of the tokens from `token` on; 0 from `end` on."""
    rows = tl.arange(0, spec.BLOCK_T)
    # The rows' address has 64 bits, offsets within them 32.
    start = values + tl.cast(token, tl.int64) * spec.C
    mask = (token + rows < end)[:, None] & (channels < spec.C)[None, :]
    return tl.load(start + (rows[:, None] * spec.C + channels[None, :]), mask=mask, other=0.0)
