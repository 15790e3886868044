"""The gradient of the quantised matmul in XLA."""

from typing import Any

import jax

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_xla.quantized_matmul.forward import product


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record: of x alone.

    Args:
        pullback: Record, cotangent [M, N], and the requested names.
        config: Not read.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: QuantizedMatmul = pullback.record
    axis = 0 if record.transpose else 1
    return {name: product(record, pullback.cotangent, axis) for name in sorted(pullback.grad_fields)}
