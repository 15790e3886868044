"""Backward pass of the quantized matmul on TPUs."""

import jax

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.quantized_matmul.config import TpuQuantized
from ejkernel_pallas.tpu.quantized_matmul.forward import multiply
from ejkernel_pallas.tpu.quantized_matmul.kernels.matmul import multiply_packed
from ejkernel_pallas.tpu.quantized_matmul.kernels.transposed_matmul import multiply_transposed_packed


def backward(pullback: Pullback, config: TpuQuantized) -> dict[str, jax.Array]:
    """Returns the gradient of x: the cotangent times the transposed matrix, computed by the kernel of the other
    layout.

    Args:
        pullback: Record, cotangent [M, N], and the names of the requested fields.
        config: Tiles.

    Returns:
        [M, K] in x's dtype, if it is requested.
    """
    record: QuantizedMatmul = pullback.record
    kernel = multiply_packed if record.transpose else multiply_transposed_packed
    cotangent = pullback.cotangent.astype(record.x.dtype)
    return {name: multiply(kernel, record, cotangent, config) for name in sorted(pullback.grad_fields)}
