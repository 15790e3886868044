"""Gradients of collective matmul on TPUs: of x by the kernel of the other collective, of y by one of its own."""

import jax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.families.ring_attention import axis_size
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.collective_matmul.config import TpuCollective
from ejkernel_pallas.tpu.collective_matmul.kernels.gather_matmul import gather_matmul
from ejkernel_pallas.tpu.collective_matmul.kernels.scatter_matmul import scatter_matmul
from ejkernel_pallas.tpu.collective_matmul.kernels.weight_gradient import weight_gradient
from ejkernel_pallas.tpu.collective_matmul.spec import make_spec, multiply_on_one_device


def backward(pullback: Pullback, config: TpuCollective) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent of the output's shape, and the requested names.
        config: Tiles.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: CollectiveMatmul = pullback.record
    cotangent = pullback.cotangent.astype(record.x.dtype)
    gradients = {
        name: (_x_gradient if name == "x" else _y_gradient)(record, cotangent, config)
        for name in sorted(pullback.grad_fields)
    }
    return {name: gradient.astype(record.x.dtype) for name, gradient in gradients.items()}


def _x_gradient(record: CollectiveMatmul, cotangent: jax.Array, config: TpuCollective) -> jax.Array:
    y_axis = 0 if record.transpose_y else 1
    if axis_size(record.axis_name) == 1:
        return multiply_on_one_device(record, cotangent, record.y, (1, y_axis))
    kernel = scatter_matmul if record.collective == "all_gather" else gather_matmul
    return kernel(cotangent, record.y, y_axis, make_spec(record, config))


def _y_gradient(record: CollectiveMatmul, cotangent: jax.Array, config: TpuCollective) -> jax.Array:
    gathers = record.collective == "all_gather"
    local_rows, all_rows = (record.x, cotangent) if gathers else (cotangent, record.x)
    if axis_size(record.axis_name) == 1:
        gradient = multiply_on_one_device(record, local_rows, all_rows, (0, 0))
    else:
        gradient = weight_gradient(local_rows, all_rows, make_spec(record, config))
    is_transposed = gathers == record.transpose_y  # rows of `gradient` are K where x travels, else N
    return gradient.T if is_transposed else gradient
