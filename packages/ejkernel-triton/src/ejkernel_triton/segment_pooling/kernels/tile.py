"""Device helpers of the segment pooling kernels: searches for pools, and loads of rows of tokens."""

import triton
import triton.language as tl


@triton.jit
def count_entries_up_to(range_column, bound, spec: tl.constexpr):
    """Returns the number of pools whose entry in a column of `ranges` is at most `bound`; elementwise for a vector
    of bounds.
    """
    NUM_BINARY_SEARCH_STEPS: tl.constexpr = spec.NUM_BINARY_SEARCH_STEPS
    num_found = bound * 0
    # A binary search without branches, so that a vector of bounds can take every step together. Each step depends on
    # the load of the last one, and there are log2(M) steps.
    for level in tl.static_range(NUM_BINARY_SEARCH_STEPS):
        step = spec.FIRST_SEARCH_STEP >> level
        in_range = num_found + step <= spec.M
        # Ranges are pairs, so entries of a column are 2 apart. Nothing is loaded past the last pool.
        last_entry_of_step = tl.load(range_column + 2 * (num_found + step - 1), mask=in_range, other=0)
        num_found = tl.where(in_range & (last_entry_of_step <= bound), num_found + step, num_found)
    return num_found


@triton.jit
def count_ended_and_started_pools(ranges, start, last_token, spec: tl.constexpr):
    """Returns the number of pools that end at or before the token `start`, and of those that start at or before
    `last_token`.
    """
    POOLS_PER_SEARCH_STEP: tl.constexpr = spec.POOLS_PER_SEARCH_STEP
    NUM_BLOCK_SEARCH_STEPS: tl.constexpr = spec.NUM_BLOCK_SEARCH_STEPS
    indices_in_step = tl.arange(0, POOLS_PER_SEARCH_STEP) + 1
    num_ended, num_started = tl.cast(start * 0, tl.int32), tl.cast(start * 0, tl.int32)
    # Each step compares POOLS_PER_SEARCH_STEP pools at once, for both columns: a program waits for memory once for up
    # to POOLS_PER_SEARCH_STEP pools, twice for POOLS_PER_SEARCH_STEP * POOLS_PER_SEARCH_STEP, where a binary search
    # would wait log2(M) times.
    for level in tl.static_range(NUM_BLOCK_SEARCH_STEPS):
        stride = POOLS_PER_SEARCH_STEP ** (NUM_BLOCK_SEARCH_STEPS - 1 - level)
        end_indices, start_indices = (
            num_ended + indices_in_step * stride - 1,
            num_started + indices_in_step * stride - 1,
        )
        end_tokens = tl.load(ranges + 2 * end_indices + 1, mask=end_indices < spec.M, other=0)
        start_tokens = tl.load(ranges + 2 * start_indices, mask=start_indices < spec.M, other=0)
        num_ended += stride * tl.sum(tl.where((end_indices < spec.M) & (end_tokens <= start), 1, 0), axis=0)
        num_started += stride * tl.sum(tl.where((start_indices < spec.M) & (start_tokens <= last_token), 1, 0), axis=0)
    return num_ended, num_started


@triton.jit
def load_num_tokens(lengths, row, spec: tl.constexpr, per: tl.constexpr):
    """Returns the valid tokens of a row."""
    if spec.HAS_LENGTHS:
        return tl.load(lengths + row // per.LENGTHS)
    else:
        return tl.cast(row * 0 + spec.T, tl.int32)


@triton.jit
def load_pool_range(ranges, pool, tokens, pool_mask, spec: tl.constexpr):
    """Returns the first token of a pool, or of each of a vector of pools, and the token after its last."""
    if spec.HAS_RANGES:
        first_token = tl.load(ranges + 2 * pool, mask=pool_mask, other=0)
        return first_token, tl.load(ranges + 2 * pool + 1, mask=pool_mask, other=0)
    else:
        return tl.minimum(pool * spec.CHUNK_SIZE, tokens), tl.minimum((pool + 1) * spec.CHUNK_SIZE, tokens)


@triton.jit
def load_tokens(values, token, end, channels, spec: tl.constexpr):
    """Returns [BLOCK_T, BLOCK_C] of the tokens from `token` on; 0 from `end` on."""
    rows = tl.arange(0, spec.BLOCK_T)
    # The rows' address has 64 bits, offsets within them 32.
    start = values + tl.cast(token, tl.int64) * spec.C
    mask = (token + rows < end)[:, None] & (channels < spec.C)[None, :]
    return tl.load(start + (rows[:, None] * spec.C + channels[None, :]), mask=mask, other=0.0)
