"""Forward pass of a grouped matmul in Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles, max_num_row_tiles
from ejkernel_triton.grouped_matmul.config import GROUP_M, GroupedForward
from ejkernel_triton.grouped_matmul.spec import (
    GroupedGemmSpec,
    add_batch_axis,
    choose_dot_precision,
    choose_operand_dtype,
    converts_to_float32,
    dequantize_lhs,
    longest_float8_step,
    num_scales_along_contraction,
)
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: GroupedMatmul, config: GroupedForward) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes, programs, warps and stages.

    Raises:
        ValueError: A step of the 8-bit product has more than one scale.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    if longest_float8_step(record):
        return _multiply_float8(record, config), ()
    record = dequantize_lhs(record)
    scale_dtypes = () if record.rhs_scale is None else (jnp.float32,)
    spec = _make_spec(record, config, choose_operand_dtype(record, *scale_dtypes))
    if record.rhs_scale is not None and record.rhs_scale.shape[1] == 1:
        spec = dataclasses.replace(spec, RHS_SCALE_MODE="columns")
    return multiply_rows(record, record.lhs, spec, config, record.out_dtype), ()


def _multiply_float8(record: GroupedMatmul, config: GroupedForward) -> jax.Array:
    """Returns the output of 8-bit rows and matrices, multiplied by tensor cores without conversion."""
    step, (lhs_blocks, rhs_blocks) = longest_float8_step(record), num_scales_along_contraction(record)
    if step % config.block_k:
        raise ValueError(f"cfg: got block_k={config.block_k}, wants a divisor of {step}, which share a scale")
    spec = dataclasses.replace(
        _make_spec(record, config, record.lhs.dtype),
        RHS_SCALE_MODE="columns" if rhs_blocks == 1 else "steps",
        LHS_SCALE_MODE="rows" if lhs_blocks == 1 else "steps",
        LHS_SCALES_PER_ROW=lhs_blocks,
        MAX_IMPRECISE_ACC=None if record.precision == lax.Precision.DEFAULT else config.block_k,
    )
    return multiply_rows(record, record.lhs, spec, config, record.out_dtype)


def compute_lhs_gradient(record: GroupedMatmul, cotangent: jax.Array, config: GroupedForward) -> jax.Array:
    """Returns the cotangent's rows times the transposed matrix of their group; 0 for unassigned rows.

    Args:
        record: The canonical arguments.
        cotangent: [M, N] in the dtype of the product's operands.
        config: Tile sizes, programs, warps and stages.
    """
    record = dataclasses.replace(record, left_over="zero")
    spec = _make_spec(record, config, cotangent.dtype)
    spec = dataclasses.replace(
        spec,
        # The matrices are read transposed by exchanging strides, without a copy.
        CONTRACTED_SIZE=spec.COLUMNS,
        COLUMNS=spec.CONTRACTED_SIZE,
        RHS_STRIDES=spec.RHS_STRIDES[::-1],
        RHS_SCALE_STRIDES=spec.RHS_SCALE_STRIDES[::-1],
        RHS_SCALE_BLOCK=spec.RHS_SCALE_BLOCK[::-1],
        HAS_BIAS=False,
        HAS_EXISTING_OUT=False,
    )
    return multiply_rows(record, cotangent, spec, config, record.lhs.dtype)


def _make_spec(record: GroupedMatmul, config: GroupedForward, operand: Any) -> GroupedGemmSpec:
    """Returns the constants of the forward kernel."""
    (rows, contracted), width, scale = record.lhs.shape, columns(record), record.rhs_scale
    blocks = 1 if scale is None else scale.shape[1]
    return GroupedGemmSpec(
        ROWS=rows,
        CONTRACTED_SIZE=contracted,
        COLUMNS=width,
        NUM_MATRICES=record.rhs.shape[0],
        RHS_STRIDES=(1, contracted) if record.transpose_rhs else (width, 1),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        FLATTEN_LOOPS=config.flatten,
        TILE_LIST_LENGTH=max_num_row_tiles(rows, record.rhs.shape[0], config.block_m),
        NUM_PROGRAMS=config.num_programs,
        GROUP_M=GROUP_M,
        RHS_SCALE_MODE="no" if scale is None else "elements",
        RHS_SCALE_STRIDES=(width, 1),
        RHS_SCALE_BLOCK=(contracted // blocks, 1),
        SCALES_PER_MATRIX=blocks * width,
        LHS_SCALE_MODE="no",
        LHS_SCALES_PER_ROW=1,
        HAS_BIAS=record.rhs_bias is not None,
        HAS_EXISTING_OUT=record.existing_out is not None,
        OPERAND_DTYPE=jnp.dtype(operand).name,
        PRECISION=choose_dot_precision(record),
        WIDEN_TO_FLOAT32=converts_to_float32(operand),
        MAX_IMPRECISE_ACC=None,
    )


def multiply_rows(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedGemmSpec, config: GroupedForward, dtype: Any
) -> jax.Array:
    """Multiplies the rows by the matrices of their groups, as the spec says.

    Args:
        record: The record with the groups and matrices.
        rows: [M, C].
        spec: The kernel's constants.
        config: Warps and stages.
        dtype: Dtype of the result.

    Returns:
        [M, COLUMNS].
    """
    from ejkernel_triton.grouped_matmul.kernels.grouped_gemm import grouped_gemm_kernel

    scale = _as_float32(record.rhs_scale)
    (output,) = launch(
        grouped_gemm_kernel,
        (
            rows[None],
            record.rhs[None],
            add_batch_axis(scale),
            None if spec.LHS_SCALE_MODE == "no" else add_batch_axis(_as_float32(record.lhs_scale)),
            add_batch_axis(record.rhs_bias) if spec.HAS_BIAS else None,
            add_batch_axis(record.existing_out) if spec.HAS_EXISTING_OUT else None,
            find_row_tiles(record, spec.BLOCK_M)[None],
        ),
        (ShapeDtype((1, spec.ROWS, spec.COLUMNS), dtype),),
        batch=1,
        grid=spec.NUM_PROGRAMS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return output[0]


def _as_float32(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else scale.astype(jnp.float32)
