"""Defines what quantized matmul computes, in plain jnp.

With w the [K, N] matrix of the codes (`ejkernel.planning.quantized_formats` says what they mean):

    out_i = x_i w          times the tensor scale, where there is one

Products and sums are taken in float32 (float64 for float64 x). An implementation may round w to x's dtype, or x times
the scales, where matrix units want their operands so; the operation's tolerance has room for either. Rows of the packed
matrix are those of w, or with `transpose` its columns. With do the cotangent of the output, dx_i = do_i w^T; codes,
scales and zeros have no gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.quantized_matmul.record import QuantizedMatmul, accumulator
from ejkernel.planning.quantized_formats import decode


def reference(record: QuantizedMatmul) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    dtype = accumulator(record)
    weights = decode(record.packed, record.scales, record.zeros, record.format, record.tensor_scale).astype(dtype)
    weights = weights.T if record.transpose else weights
    output = jnp.matmul(record.x.astype(dtype), weights, precision=lax.Precision.HIGHEST)
    return output.astype(record.x.dtype), ()
