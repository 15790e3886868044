"""Backward pass of the quantised matmul in Triton."""

import jax

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_triton.quantized_matmul.config import QuantizedTiles
from ejkernel_triton.quantized_matmul.forward import packed_matmul, packed_matmul_transposed


def backward(pullback: Pullback, config: QuantizedTiles) -> dict[str, jax.Array]:
    """Returns the gradient of x: the cotangent times the transposed matrix, by the kernel of the other layout.

    Args:
        pullback: Record, cotangent [M, N], and the names of the requested fields.
        config: Tiles, splits, warps and stages.

    Returns:
        The gradient [M, K] in x's dtype, if it is requested.
    """
    record: QuantizedMatmul = pullback.record
    matmul = packed_matmul if record.transpose else packed_matmul_transposed
    return {name: matmul(record, pullback.cotangent, config) for name in sorted(pullback.grad_fields)}
