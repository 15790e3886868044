"""The quantised matmul in XLA."""

from typing import Any

import jax
from jax import lax

from ejkernel.families.quantized_matmul import QuantizedMatmul, accumulator, apply_tensor_scale, dequantized_matrix
from ejkernel.planning.precision import product_precision


def forward(record: QuantizedMatmul, config: Any) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    return product(record, record.x, 1 if record.transpose else 0), ()


def product(record: QuantizedMatmul, rows: jax.Array, axis: int) -> jax.Array:
    """Returns rows times the matrix, over one axis of the matrix in its layout."""
    product = lax.dot_general(
        rows.astype(record.x.dtype),
        dequantized_matrix(record),
        (((1,), (axis,)), ((), ())),
        precision=product_precision(record.x.dtype, record.precision),
        preferred_element_type=accumulator(record),
    )
    return apply_tensor_scale(record, product)
