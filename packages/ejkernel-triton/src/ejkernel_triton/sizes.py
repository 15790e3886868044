"""Arithmetic of tile sizes, and constants of exponents."""

import math

LOG2E = math.log2(math.e)
"""Kernels compute exponentials as powers of two: exp(x) is exp2(LOG2E x)."""


def ceil_div(size: int, block: int) -> int:
    """How many blocks of a length cover a size."""
    return -(-size // block)


def padded(size: int, least: int = 1) -> int:
    """Returns the smallest power of two that is neither below a size nor below `least`, itself a power of two."""
    return max(least, 1 << (size - 1).bit_length())


def padded_for_dot(size: int) -> int:
    """Returns the smallest power of two that is not below a size and that `tl.dot` takes: at least 16."""
    return padded(size, 16)
