"""Backward pass of a grouped matmul on TPUs; the formulas are in `ejkernel_xla.grouped_matmul.backward`.

The gradient of lhs is a grouped matmul itself, of the cotangent with the matrices transposed. What belongs to a matrix
is summed over its rows by a kernel that owns matrices.
"""

import jax

from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul.matrices import sums
from ejkernel_pallas.tpu.grouped_matmul.rows import multiply
from ejkernel_pallas.tpu.grouped_matmul.spec import backward_spec, blocks_of, matrices_spec
from ejkernel_pallas.tpu.grouped_matmul.tiles import TpuMatmul


def backward(pullback: Pullback, config: TpuMatmul) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the wanted names.
        config: Tile sizes `block_m`, `block_k` and `block_n`, of both kernels.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, cotangent, wanted, blocks = pullback.record, pullback.cotangent, pullback.wanted, blocks_of(config)
    gradients: dict[str, jax.Array] = {}
    if "existing_out" in wanted:
        gradients["existing_out"] = cotangent.astype(record.existing_out.dtype)
    # Rounded once where every product rounds it; sums for a bias take it as it is.
    spec = backward_spec(record, blocks)
    rounded = cotangent.astype(spec.operand)
    if "lhs" in wanted:
        gradients["lhs"] = multiply(record, rounded, spec, {}, record.lhs.dtype)
    of_matrices = wanted & {"rhs", "rhs_scale", "rhs_bias"}
    if of_matrices:
        given = cotangent if "rhs_bias" in of_matrices else rounded
        gradients |= sums(record, given, matrices_spec(record, blocks), of_matrices)
    return gradients
