"""The quantised matmul in XLA."""

import jax
from jax import lax

from ejkernel.families.quantized_matmul import QuantizedMatmul, accumulator, apply_tensor_scale, dequantized_matrix
from ejkernel.planning.fixed_tiles import map_tiles
from ejkernel.planning.precision import product_precision
from ejkernel_xla.fixed_tiles import RowOrder


def forward(record: QuantizedMatmul, config: RowOrder) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Whether rows are computed in tiles of fixed sizes.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    axis = 1 if record.transpose else 0
    if not config.batch_invariant:
        return product(record, record.x, axis), ()
    matrix = dequantized_matrix(record)  # once, outside of the loop over tiles
    return map_tiles(lambda tile: product(record, tile["x"], axis, matrix), {"x": record.x}), ()


def product(record: QuantizedMatmul, rows: jax.Array, axis: int, matrix: jax.Array | None = None) -> jax.Array:
    """Returns rows times the matrix, over one axis of the matrix in its layout."""
    product = lax.dot_general(
        rows.astype(record.x.dtype),
        dequantized_matrix(record) if matrix is None else matrix,
        (((1,), (axis,)), ((), ())),
        precision=product_precision(record.x.dtype, record.precision),
        preferred_element_type=accumulator(record),
    )
    return apply_tensor_scale(record, product)
