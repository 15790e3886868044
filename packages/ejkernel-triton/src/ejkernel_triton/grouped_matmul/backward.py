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
from ejkernel.families.grouped_matmul import GroupedMatmul, group_row_bounds, lhs_and_scale_gradients, spread
from ejkernel.types.pullback import Pullback
from ejkernel_triton.grouped_matmul.config import GROUP_M, GroupedBackward
from ejkernel_triton.grouped_matmul.forward import compute_lhs_gradient
from ejkernel_triton.grouped_matmul.spec import (
    GroupedRhsGradientSpec,
    choose_dot_precision,
    choose_operand_dtype,
    converts_to_float32,
    dequantize_lhs,
)
from ejkernel_triton.launch import ShapeDtype, launch


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
    record, cotangent, requested = pullback.record, pullback.cotangent, pullback.grad_fields
    gradients: dict[str, jax.Array] = {}
    if "existing_out" in requested:
        gradients["existing_out"] = cotangent.astype(record.existing_out.dtype)
    if "rhs_bias" in requested:
        bias_gradients = _bias_gradients(record, _cast_cotangent_for_bias(record, cotangent))
        gradients["rhs_bias"] = bias_gradients.astype(record.rhs_bias.dtype)
    if "lhs" in requested:
        scale_dtypes = () if record.rhs_scale is None else (jnp.float32,)
        operand = cotangent.astype(choose_operand_dtype(record, cotangent.dtype, *scale_dtypes))
        gradients["lhs"] = compute_lhs_gradient(record, operand, config)
    if requested & {"rhs", "rhs_scale"}:
        gradients |= _matrix_gradients(record, cotangent, config, requested)
    return gradients


def _scaled_row_gradients(pullback: Pullback, config: GroupedBackward) -> dict[str, jax.Array]:
    """Returns the gradients of a record whose rows have scales: first of the scaled rows, from which both are
    derived.
    """
    record, requested = pullback.record, pullback.grad_fields
    inner_fields = requested - {"lhs_scale"} | ({"lhs"} if "lhs_scale" in requested else set())
    gradients = backward(
        dataclasses.replace(pullback, record=dequantize_lhs(record), grad_fields=frozenset(inner_fields)), config
    )
    if "lhs" in inner_fields:
        gradients |= lhs_and_scale_gradients(record, gradients["lhs"], record.lhs, record.lhs_scale)
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in requested}


def _matrix_gradients(
    record: GroupedMatmul, cotangent: jax.Array, config: GroupedBackward, requested_fields: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns gradients of the matrices and of their scales."""
    if record.rhs_scale is None:
        return {"rhs": _lhs_cotangent_products(record, cotangent, config, record.rhs.dtype)}
    sums, gradients = _lhs_cotangent_products(record, cotangent, config, jnp.float32), {}
    if "rhs" in requested_fields:
        element_scales = spread(record, record.rhs_scale.astype(jnp.float32))
        gradients["rhs"] = (sums * element_scales).astype(record.rhs.dtype)
    if "rhs_scale" in requested_fields:
        scale_gradient_terms = sums * record.rhs.astype(jnp.float32)
        scale_gradient_terms = (
            jnp.swapaxes(scale_gradient_terms, 1, 2) if record.transpose_rhs else scale_gradient_terms
        )
        matrices, blocks, _, width = record.rhs_scale.shape
        scale_gradient_terms = scale_gradient_terms.reshape(matrices, blocks, -1, width).sum(axis=2, keepdims=True)
        gradients["rhs_scale"] = scale_gradient_terms.astype(record.rhs_scale.dtype)
    return gradients


def _lhs_cotangent_products(
    record: GroupedMatmul, cotangent: jax.Array, config: GroupedBackward, dtype: Any
) -> jax.Array:
    """Returns the sums of lhs_i^T do_i over the rows of each group, in the matrices' memory layout."""
    from ejkernel_triton.grouped_matmul.kernels.grouped_gemm_drhs import grouped_gemm_drhs_kernel

    operand = choose_operand_dtype(record, cotangent.dtype)
    operands = record.lhs.astype(operand), cotangent.astype(operand)
    left_operand, right_operand = operands[::-1] if record.transpose_rhs else operands
    spec = _make_spec(
        record, (left_operand, right_operand), (config.rhs_block_m, config.rhs_block_n, config.rhs_block_k)
    )
    tiles = cdiv(spec.OUTPUT_ROWS, spec.BLOCK_OUTPUT_ROWS) * cdiv(spec.OUTPUT_COLUMNS, spec.BLOCK_OUTPUT_COLUMNS)
    (sums,) = launch(
        grouped_gemm_drhs_kernel,
        (left_operand[None], right_operand[None], _group_row_bounds(record)),
        (ShapeDtype((1, *record.rhs.shape), dtype),),
        batch=1,
        grid=spec.NUM_MATRICES * tiles,
        num_warps=config.rhs_num_warps,
        num_stages=config.rhs_num_stages,
        constants={"spec": spec},
    )
    return sums[0]


def _cast_cotangent_for_bias(record: GroupedMatmul, cotangent: jax.Array) -> jax.Array:
    """Returns the cotangent in the dtype in which it is summed for the biases: that of the products' operand, unless
    the biases hold numbers that it does not.

    A float32 cotangent of 16-bit rows is then never stored, neither for the products nor for the biases.
    """
    dtype = choose_operand_dtype(record, cotangent.dtype)
    assert record.rhs_bias is not None  # its gradient is requested
    return cotangent.astype(dtype) if jnp.promote_types(record.rhs_bias.dtype, dtype) == dtype else cotangent


def _bias_gradients(record: GroupedMatmul, cotangent: jax.Array) -> jax.Array:
    """Sums of the cotangent over the rows of each group, [E, 1, N] float32."""
    from ejkernel_triton.grouped_matmul.kernels.grouped_dbias import grouped_dbias_kernel

    spec = _make_spec(record, (cotangent, cotangent), (16, 128, 32))
    (sums,) = launch(
        grouped_dbias_kernel,
        (cotangent[None], _group_row_bounds(record)),
        (ShapeDtype((1, spec.NUM_MATRICES, 1, spec.OUTPUT_COLUMNS), jnp.float32),),
        batch=1,
        grid=spec.NUM_MATRICES * cdiv(spec.OUTPUT_COLUMNS, spec.BLOCK_OUTPUT_COLUMNS),
        num_warps=4,
        num_stages=2,
        constants={"spec": spec},
    )
    return sums[0]


def _group_row_bounds(record: GroupedMatmul) -> jax.Array:
    """Returns the first row of every matrix's group and the row after its last, [1, E, 2]."""
    return jnp.stack(group_row_bounds(record), axis=1)[None]


def _make_spec(
    record: GroupedMatmul, operands: tuple[jax.Array, jax.Array], block_sizes: tuple[int, int, int]
) -> GroupedRhsGradientSpec:
    """Returns the constants of a kernel that sums over rows of a pair of operands."""
    left_operand, right_operand = operands
    return GroupedRhsGradientSpec(
        ROWS=left_operand.shape[0],
        OUTPUT_ROWS=left_operand.shape[1],
        OUTPUT_COLUMNS=right_operand.shape[1],
        BLOCK_OUTPUT_ROWS=block_sizes[0],
        BLOCK_OUTPUT_COLUMNS=block_sizes[1],
        BLOCK_K=block_sizes[2],
        NUM_MATRICES=record.rhs.shape[0],
        GROUP_M=GROUP_M,
        PRECISION=choose_dot_precision(record),
        WIDEN_TO_FLOAT32=converts_to_float32(left_operand.dtype),
    )
