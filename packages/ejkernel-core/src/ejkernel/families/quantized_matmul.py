"""The quantised matmul family: the record its operation lowers to and its meaning.

With w the [K, N] matrix of the codes (`ejkernel.planning.quantized_formats` says what they mean):

    out_i = x_i w          times the tensor scale, where there is one

Products and sums are taken in float32 (float64 for float64 x). An implementation may round w to x's dtype, or x times
the scales, where matrix units want their operands so; the operation's tolerance has room for either. Rows of the packed
matrix are those of w, or with `transpose` its columns. With do the cotangent of the output, dx_i = do_i w^T; codes,
scales and zeros have no gradient.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning.precision import rounded
from ejkernel.planning.quantized_formats import Format, decode


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
    """The dtype of sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def finished(record: QuantizedMatmul, sums: jax.Array) -> jax.Array:
    """The output, or the gradient of x, of float32 sums over the matrix without its tensor scale."""
    if record.tensor_scale is not None:
        sums = sums * record.tensor_scale
    return sums.astype(record.x.dtype)


def columns(record: QuantizedMatmul) -> int:
    """N."""
    return record.scales.shape[0] if record.transpose else record.scales.shape[1] * record.format.group_size


def matrix(record: QuantizedMatmul) -> jax.Array:
    """w without its tensor scale, rounded to x's dtype: [K, N], or [N, K] if `transpose`."""
    return rounded(decode(record.packed, record.scales, record.zeros, record.format), record.x.dtype).astype(
        record.x.dtype
    )


def reference(record: QuantizedMatmul) -> tuple[jax.Array, tuple[()]]:
    """The family's meaning in plain jnp.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    dtype = accumulator(record)
    weights = decode(record.packed, record.scales, record.zeros, record.format, record.tensor_scale).astype(dtype)
    weights = weights.T if record.transpose else weights
    output = jnp.matmul(record.x.astype(dtype), weights, precision=lax.Precision.HIGHEST)
    return output.astype(record.x.dtype), ()


def localise(record: QuantizedMatmul, offsets: Mapping[str, jax.Array]) -> QuantizedMatmul:
    """One shard's record: rows, and columns that lie in rows of their own, are independent."""
    return record


def axes(record: QuantizedMatmul) -> dict[str, str]:
    """Axis letters of a record's fields and of its output; w counts words and q groups."""
    row = "n" if record.transpose else "k"
    packed = {"packed": f"{row} w", "scales": f"{row} q", "zeros": f"{row} q", "tensor_scale": ""}
    return {"x": "m k", **packed, "output": "m n"}


def requests(record: QuantizedMatmul) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: its rows."""
    return ({"m": np.arange(record.x.shape[0])},)


FAMILY = Family(
    name="quantized_matmul",
    record=QuantizedMatmul,
    differentiable=("x",),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.x.shape[-1], columns(record)),
    axes=axes,
    shardable=lambda record: "mn" if record.transpose else "m",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
