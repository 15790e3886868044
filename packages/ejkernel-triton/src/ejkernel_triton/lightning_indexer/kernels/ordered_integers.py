"""Converts scores to integers in the order of numbers, and back; see `ejkernel.families.lightning_indexer`."""

import triton
import triton.language as tl


@triton.jit
def integers_in_order(x):
    """Returns int32 in the order of float32 x: -0 equals 0, and NaN of either sign is the largest integer."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def floats_of_integers(x):
    """Returns the float32 of integers from `integers_in_order`; -0 comes back as 0."""
    # The smallest integer minus x has the magnitude of x, and the sign bit.
    return tl.where(x < 0, -0x80000000 - x, x).to(tl.float32, bitcast=True)
