"""Both passes of the quantised matmul in XLA."""

from typing import Any

import jax
from jax import lax

from ejkernel.families.quantized_matmul import QuantizedMatmul, accumulator, finished, matrix
from ejkernel.planning.precision import product_precision
from ejkernel.types.pullback import Pullback


def forward(record: QuantizedMatmul, config: Any) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    return _product(record, record.x, 1 if record.transpose else 0), ()


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of the wanted fields of a record: of x alone.

    Args:
        pullback: Record, cotangent [M, N], and the wanted names.
        config: Not read.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record: QuantizedMatmul = pullback.record
    axis = 0 if record.transpose else 1
    return {name: _product(record, pullback.cotangent, axis) for name in sorted(pullback.wanted)}


def _product(record: QuantizedMatmul, rows: jax.Array, axis: int) -> jax.Array:
    """Returns rows times the matrix, over one axis of the matrix in its layout."""
    product = lax.dot_general(
        rows.astype(record.x.dtype),
        matrix(record),
        (((1,), (axis,)), ((), ())),
        precision=product_precision(record.x.dtype, record.precision),
        preferred_element_type=accumulator(record),
    )
    return finished(record, product)
