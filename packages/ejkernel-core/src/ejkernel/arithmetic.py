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
