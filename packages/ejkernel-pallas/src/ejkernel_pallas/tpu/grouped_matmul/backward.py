"""Backward pass of a grouped matmul on TPUs; the formulas are in `ejkernel_xla.grouped_matmul.backward`.

The gradient of lhs is a grouped matmul itself, of the cotangent with the transposed matrices. Gradients of matrices,
scales and biases are sums over a matrix's rows, by a kernel that accumulates for tiles of matrices.
"""

import jax

from ejkernel.families.gated_grouped_matmul.gradients import recompute_products_and_gradients
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.forward import forward
from ejkernel_pallas.tpu.grouped_matmul.kernels.grouped_matmul import multiply
from ejkernel_pallas.tpu.grouped_matmul.kernels.matrix_gradients import matrix_gradients
from ejkernel_pallas.tpu.grouped_matmul.spec import backward_spec, matrix_gradients_spec, tile_sizes_of


def backward(pullback: Pullback, config: TpuMatmul) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the names of the requested fields.
        config: Tile sizes `block_m`, `block_k` and `block_n`, of both kernels.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, cotangent, grad_fields, blocks = (
        pullback.record,
        pullback.cotangent,
        pullback.grad_fields,
        tile_sizes_of(config),
    )
    gradients: dict[str, jax.Array] = {}
    if "existing_out" in grad_fields:
        gradients["existing_out"] = cotangent.astype(record.existing_out.dtype)
    # Rounded once if every product rounds it; `matrix_gradients` for a bias takes it unrounded.
    spec = backward_spec(record, blocks)
    rounded = cotangent.astype(spec.operand_dtype)
    if "lhs" in grad_fields:
        gradients["lhs"] = multiply(record, rounded, spec, {}, record.lhs.dtype)
    matrix_fields = grad_fields & {"rhs", "rhs_scale", "rhs_bias"}
    if matrix_fields:
        rows = cotangent if "rhs_bias" in matrix_fields else rounded
        gradients |= matrix_gradients(record, rows, matrix_gradients_spec(record, blocks), matrix_fields)
    return gradients


def gated_backward(pullback: Pullback, config: TpuMatmul) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a gated product, whose products are computed again.

    Args:
        pullback: Record, cotangent [M, F], and the names of the requested fields.
        config: Tile sizes `block_m`, `block_k` and `block_n`, of all kernels.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """

    def multiply_rows(product_record: GroupedMatmul) -> jax.Array:
        return forward(product_record, config)[0]

    return recompute_products_and_gradients(pullback, multiply_rows, lambda inner: backward(inner, config))
