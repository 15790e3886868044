"""Defines what collective matmul computes, in plain jnp.

With P devices along the axis, x_i and y_i of device i:

    all_gather        out_i = concatenate(x_0, ..., x_{P-1}) y_i
    reduce_scatter    out_i = rows i M / P to (i + 1) M / P of  x_0 y_0 + ... + x_{P-1} y_{P-1}

Products and sums are taken in float32 (float64 for float64 x), and rounded once. Each is the transpose of the other.
With do_i the cotangent of out_i, of the first:

    dx_i = rows of device i of  do_0 y_0^T + ... + do_{P-1} y_{P-1}^T        a reduce-scatter
    dy_i = concatenate(x_0, ...)^T do_i

and of the second:

    dx_i = concatenate(do_0, ..., do_{P-1}) y_i^T                             an all-gather
    dy_i = x_i^T concatenate(do_0, ...)

Source: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.collective_matmul.record import CollectiveMatmul, accumulator
from ejkernel.families.ring_attention import axis_size


def reference(record: CollectiveMatmul) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp.

    Returns:
        [P M, N] or [M / P, N] in x's dtype. There are no residuals.
    """
    dtype, is_split = accumulator(record), axis_size(record.axis_name) > 1
    x, y = record.x.astype(dtype), record.y.astype(dtype)
    if is_split and record.collective == "all_gather":
        x = lax.all_gather(x, record.axis_name, axis=0, tiled=True)
    output = jnp.matmul(x, y.T if record.transpose_y else y, precision=lax.Precision.HIGHEST)
    if is_split and record.collective == "reduce_scatter":
        output = lax.psum_scatter(output, record.axis_name, scatter_dimension=0, tiled=True)
    return output.astype(record.x.dtype), ()
