"""Arithmetic that plans and kernels share."""

import math
from typing import Any

LOG2E = math.log2(math.e)
"""`exp(x)` is `exp2(LOG2E * x)`."""
LN2 = math.log(2.0)
"""`log(x)` is `LN2 * log2(x)`."""


def cdiv(dividend: Any, divisor: Any) -> Any:
    """Returns `dividend / divisor` rounded up, for ints or integer arrays."""
    return -(-dividend // divisor)


def is_symbolic(size: Any) -> bool:
    """Returns whether a size is known only when the program runs, as in `jax.export`."""
    return not isinstance(size, int)


def at_most(limit: Any, size: Any) -> Any:
    """Returns the smaller of a limit and a size of an array, which does not limit if it is symbolic."""
    return limit if is_symbolic(size) else min(limit, size)


def known_or(size: Any, assumed: int) -> int:
    """Returns a size of an array, or the assumed one if it is symbolic: tiles are planned with numbers."""
    return assumed if is_symbolic(size) else size
