"""Backward pass of a grouped matmul in Triton; the formulas are in `ejkernel_xla.grouped_matmul.backward`.

The gradient of lhs is a grouped matmul itself, of the cotangent with the transposed matrices. Gradients of matrices and
biases are sums over the rows of a group: each program accumulates one tile of one matrix. If there are scales, the
gradient of the scaled matrices is computed in float32, and those of matrices and scales are derived from it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul import GroupedMatmul, gradients_of_rows, group_rows, spread
from ejkernel.types.pullback import Pullback
from ejkernel_triton.grouped_matmul.config import GROUP_M, GroupedBackward
from ejkernel_triton.grouped_matmul.forward import gradient_of_lhs
from ejkernel_triton.grouped_matmul.spec import GroupedMatricesSpec, dot_precision, operand_dtype, scaled_rows, widens
from ejkernel_triton.launch import Shape, launch


def backward(pullback: Pullback, config: GroupedBackward) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the names of the requested fields.
        config: Tile sizes, programs, warps and stages of both kernels.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    if pullback.record.lhs_scale is not None:
        return _scaled_row_gradients(pullback, config)
    record, cotangent, wanted = pullback.record, pullback.cotangent, pullback.wanted
    gradients: dict[str, jax.Array] = {}
    if "existing_out" in wanted:
        gradients["existing_out"] = cotangent.astype(record.existing_out.dtype)
    if "rhs_bias" in wanted:
        gradients["rhs_bias"] = _bias_sums(record, cotangent).astype(record.rhs_bias.dtype)
    if "lhs" in wanted:
        scaled = () if record.rhs_scale is None else (jnp.float32,)
        operand = cotangent.astype(operand_dtype(record, cotangent.dtype, *scaled))
        gradients["lhs"] = gradient_of_lhs(record, operand, config)
    if wanted & {"rhs", "rhs_scale"}:
        gradients |= _matrix_gradients(record, cotangent, config, wanted)
    return gradients


def _scaled_row_gradients(pullback: Pullback, config: GroupedBackward) -> dict[str, jax.Array]:
    """Returns the gradients of a record whose rows have scales: first of the scaled rows, from which both are
    derived.
    """
    record, wanted = pullback.record, pullback.wanted
    inner = wanted - {"lhs_scale"} | ({"lhs"} if "lhs_scale" in wanted else set())
    gradients = backward(dataclasses.replace(pullback, record=scaled_rows(record), wanted=frozenset(inner)), config)
    if "lhs" in inner:
        gradients |= gradients_of_rows(record, gradients["lhs"], record.lhs, record.lhs_scale)
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in wanted}


def _matrix_gradients(
    record: GroupedMatmul, cotangent: jax.Array, config: GroupedBackward, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns gradients of the matrices and of their scales."""
    if record.rhs_scale is None:
        return {"rhs": _matrix_sums(record, cotangent, config, record.rhs.dtype)}
    sums, found = _matrix_sums(record, cotangent, config, jnp.float32), {}
    if "rhs" in wanted:
        factors = spread(record, record.rhs_scale.astype(jnp.float32))
        found["rhs"] = (sums * factors).astype(record.rhs.dtype)
    if "rhs_scale" in wanted:
        shares = sums * record.rhs.astype(jnp.float32)
        shares = jnp.swapaxes(shares, 1, 2) if record.transpose_rhs else shares
        matrices, blocks, _, width = record.rhs_scale.shape
        shares = shares.reshape(matrices, blocks, -1, width).sum(axis=2, keepdims=True)
        found["rhs_scale"] = shares.astype(record.rhs_scale.dtype)
    return found


def _matrix_sums(record: GroupedMatmul, cotangent: jax.Array, config: GroupedBackward, dtype: Any) -> jax.Array:
    """Returns the sums of lhs_i^T do_i over the rows of each group, in the matrices' memory layout."""
    from ejkernel_triton.grouped_matmul.kernels.grouped_gemm_drhs import grouped_gemm_drhs_kernel

    operand = operand_dtype(record, cotangent.dtype)
    pair = record.lhs.astype(operand), cotangent.astype(operand)
    left, right = pair[::-1] if record.transpose_rhs else pair
    spec = _spec(record, (left, right), (config.rhs_block_m, config.rhs_block_n, config.rhs_block_k))
    tiles = cdiv(spec.HEIGHT, spec.BLOCK_P) * cdiv(spec.WIDTH, spec.BLOCK_Q)
    (sums,) = launch(
        grouped_gemm_drhs_kernel,
        (left[None], right[None], _bounds(record)),
        (Shape((1, *record.rhs.shape), dtype),),
        batch=1,
        grid=spec.MATRICES * tiles,
        num_warps=config.rhs_num_warps,
        num_stages=config.rhs_num_stages,
        constants={"spec": spec},
    )
    return sums[0]


def _bias_sums(record: GroupedMatmul, cotangent: jax.Array) -> jax.Array:
    """Sums of the cotangent over the rows of each group, [E, 1, N] float32."""
    from ejkernel_triton.grouped_matmul.kernels.grouped_dbias import grouped_dbias_kernel

    spec = _spec(record, (cotangent, cotangent), (16, 128, 32))
    (sums,) = launch(
        grouped_dbias_kernel,
        (cotangent[None], _bounds(record)),
        (Shape((1, spec.MATRICES, 1, spec.WIDTH), jnp.float32),),
        batch=1,
        grid=spec.MATRICES * cdiv(spec.WIDTH, spec.BLOCK_Q),
        num_warps=4,
        num_stages=2,
        constants={"spec": spec},
    )
    return sums[0]


def _bounds(record: GroupedMatmul) -> jax.Array:
    """Returns the first row of every matrix's group and the row after its last, [1, E, 2]."""
    return jnp.stack(group_rows(record), axis=1)[None]


def _spec(
    record: GroupedMatmul, pair: tuple[jax.Array, jax.Array], blocks: tuple[int, int, int]
) -> GroupedMatricesSpec:
    """Returns the constants of a kernel that sums over rows of a pair of operands."""
    left, right = pair
    return GroupedMatricesSpec(
        ROWS=left.shape[0],
        HEIGHT=left.shape[1],
        WIDTH=right.shape[1],
        BLOCK_P=blocks[0],
        BLOCK_Q=blocks[1],
        BLOCK_K=blocks[2],
        MATRICES=record.rhs.shape[0],
        GROUP_M=GROUP_M,
        PRECISION=dot_precision(record),
        WIDEN=widens(left.dtype),
    )
