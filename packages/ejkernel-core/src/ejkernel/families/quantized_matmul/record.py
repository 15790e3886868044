"""Defines the argument record of quantized matmul, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning.precision import rounded
from ejkernel.planning.quantized_formats import Format, decode
from ejkernel.types.arguments import arguments, static


@arguments
class QuantizedMatmul:
    """Canonical input of one quantised matmul. M rows, K contracted, N columns, groups of Q neighbours.

    Attributes:
        x: [M, K] floating.
        packed: Codes in words, uint32 [K, ceil(N * bits / 32)], or [N, ceil(K * bits / 32)] if `transpose`.
        scales: [K, N / Q], or [N, K / Q] if `transpose`.
        format: Mode, bits and Q.
        zeros: Of the scales' shape, for affine codes alone.
        tensor_scale: float32 [], a factor on the output; None for 1.
        transpose: Whether rows of the packed matrix are columns of w.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
    """

    x: jax.Array
    packed: jax.Array
    scales: jax.Array
    format: Format = static()
    zeros: jax.Array | None = None
    tensor_scale: jax.Array | None = None
    transpose: bool = static(False)
    precision: lax.Precision | None = static(default=None)


def accumulator(record: QuantizedMatmul) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def apply_tensor_scale(record: QuantizedMatmul, sums: jax.Array) -> jax.Array:
    """Returns the output, or the gradient of x, of float32 sums over the matrix without its tensor scale."""
    if record.tensor_scale is not None:
        sums = sums * record.tensor_scale
    return sums.astype(record.x.dtype)


def columns(record: QuantizedMatmul) -> int:
    """Returns N, the number of columns."""
    return record.scales.shape[0] if record.transpose else record.scales.shape[1] * record.format.group_size


def dequantized_matrix(record: QuantizedMatmul) -> jax.Array:
    """Returns the dequantised w without its tensor scale, rounded to x's dtype: [K, N], or [N, K] if `transpose`."""
    return rounded(decode(record.packed, record.scales, record.zeros, record.format), record.x.dtype).astype(
        record.x.dtype
    )
