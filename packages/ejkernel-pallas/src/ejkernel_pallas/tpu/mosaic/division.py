"""Integer division in kernels."""

from typing import Any

import numpy as np
from jax import lax


def divide(number: Any, by: int) -> Any:
    """Returns `number // by` for a number that is not negative; a negative one is rounded towards zero.

    `//` of traced integers lowers only where JAX sees a TPU, and takes four operations more.
    """
    return number // by if isinstance(number, int) else lax.div(number, np.asarray(by, number.dtype))
