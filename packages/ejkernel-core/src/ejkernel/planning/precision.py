"""Sets the precision: products of float32 keep its digits on every device, and XLA cannot remove a rounding."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def product_precision(dtype: Any, precision: lax.Precision | None = None) -> lax.Precision | None:
    """Returns the precision at which an implementation takes the matrix products of a call.

    Left to themselves, GPUs and TPUs round float32 operands to the 11 bits of TF32 or the 8 of bfloat16, so that one
    call would have answers of another accuracy on every device. Products of 16-bit inputs lose nothing anywhere.

    Args:
        dtype: Of the call's inputs.
        precision: The call's own precision; means what it means to JAX on the device, and is never replaced.

    Returns:
        `precision`; None, for which JAX puts in `jax.default_matmul_precision`, where the caller has set that; else
        HIGHEST for float32 and wider, and DEFAULT for narrower inputs.
    """
    if precision is not None:
        return precision
    if jax.config.values["jax_default_matmul_precision"] is not None:
        return None
    return lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else lax.Precision.DEFAULT


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x with the digits of another floating dtype, in its own; 0 below that dtype's smallest normal number.

    XLA may remove a conversion to a narrower dtype and back, and does so on GPUs.
    """
    if jnp.promote_types(x.dtype, dtype) == dtype:
        return x
    digits = jnp.finfo(dtype)
    return lax.reduce_precision(x, digits.nexp, digits.nmant)
