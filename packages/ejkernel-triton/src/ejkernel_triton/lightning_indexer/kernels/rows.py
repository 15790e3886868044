"""What the kernels of the selection share: the range of a row, bisection, and counts of a row in scratch memory."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address

NO_SCORE = tl.constexpr(-0x80000000)
"""Below the integers of all scores."""
BELOW_SCORES = tl.constexpr(-0x7F800001)
"""The integer before that of -inf."""
LARGEST = tl.constexpr(0x7FFFFFFF)
"""The integer of NaN."""


@triton.jit
def load_key_range(key_starts, key_ends, first_query, row, batch, per: tl.constexpr, spec: tl.constexpr):
    """Returns (first key, number of keys) that a row of the chunk may select from."""
    token = tl.load(batch_row_address(first_query, batch, per.FIRST_QUERY, 1)) + row
    start = tl.load(batch_row_address(key_starts, batch, per.KEY_STARTS, spec.T) + token, mask=token < spec.T, other=0)
    end = tl.load(batch_row_address(key_ends, batch, per.KEY_ENDS, spec.T) + token, mask=token < spec.T, other=0)
    return start, tl.maximum(end - start, 0)


@triton.jit
def mean_without_overflow(low, high):
    """Returns the mean of two integers, rounded down."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def bisect(x, low, high, fewest, most):
    """Returns (low, high, number of x above high): a threshold with fewest to most x above it twice if it meets one,
    else consecutive integers, with at least `fewest` x above `low` and fewer above `high`.

    The arguments have that property too, and no x is above `high`.
    """
    above = 0
    while low + 1 < high:
        middle = mean_without_overflow(low, high)
        num_above = tl.sum((x > middle).to(tl.int32), 0)
        is_below, is_enough = num_above <= most, num_above >= fewest
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_below, middle, high)
        above = tl.where(is_below, num_above, above)
    return low, high, above
