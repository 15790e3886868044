"""Gradients of collective matmul on Hopper: of x by the kernel of the other collective, of y by XLA's product of rows
that a kernel has gathered.
"""

import jax
from jax import lax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.collective_matmul.config import HopperCollective
from ejkernel_pallas.gpu.collective_matmul.kernels.launch import (
    gather_and_multiply,
    gather_rows,
    multiply_and_scatter,
)
from ejkernel_pallas.gpu.collective_matmul.spec import make_spec


def backward(pullback: Pullback, params: HopperCollective) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent of the output's shape, and the requested names.
        params: Tile sizes and stages.

    Raises:
        ValueError: A size is not valid for the kernels.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: CollectiveMatmul = pullback.record
    cotangent = pullback.cotangent.astype(record.x.dtype)
    y_axis, gathers = 0 if record.transpose_y else 1, record.collective == "all_gather"
    requested = pullback.grad_fields
    spec = make_spec(record, params, cotangent, y_axis, gathers=not gathers)
    gradients: dict[str, jax.Array] = {}
    if gathers:
        if "x" in requested:
            gradients["x"] = multiply_and_scatter(spec, cotangent, record.y)
        if "y" in requested:
            gradients["y"] = _y_gradient(record, gather_rows(spec, record.x), cotangent)
        return gradients
    if "x" in requested:
        # The product of x's gradient gathers the rows that y's gradient needs.
        gradients["x"], cotangents = gather_and_multiply(spec, cotangent, record.y, keeps_rows=True)
    else:
        cotangents = gather_rows(spec, cotangent)
    if "y" in requested:
        gradients["y"] = _y_gradient(record, cotangents, record.x)
    return gradients


def _y_gradient(record: CollectiveMatmul, gathered: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns the gradient of y from the gathered rows of all devices and the rows that need no gathering."""
    is_transposed = (record.collective == "all_gather") == record.transpose_y
    left, right = (whole, gathered) if is_transposed else (gathered, whole)
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=record.y.dtype)
