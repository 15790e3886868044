"""Forward pass of a grouped matmul in Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles, most_tiles
from ejkernel_triton.grouped_matmul.config import GROUP_M, GroupedForward
from ejkernel_triton.grouped_matmul.spec import (
    GroupedRowsSpec,
    as_row,
    blocks_of_scales,
    dot_precision,
    float8_step,
    operand_dtype,
    scaled_rows,
    widens,
)
from ejkernel_triton.launch import Shape, launch


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
    if float8_step(record):
        return _float8_product(record, config), ()
    record = scaled_rows(record)
    spread = () if record.rhs_scale is None else (jnp.float32,)
    spec = _spec(record, config, operand_dtype(record, *spread))
    if record.rhs_scale is not None and record.rhs_scale.shape[1] == 1:
        spec = dataclasses.replace(spec, SCALES="columns")
    return multiply(record, record.lhs, spec, config, record.out_dtype), ()


def _float8_product(record: GroupedMatmul, config: GroupedForward) -> jax.Array:
    """Returns the output of 8-bit rows and matrices, multiplied by tensor cores without conversion."""
    step, (lhs_blocks, rhs_blocks) = float8_step(record), blocks_of_scales(record)
    if step % config.block_k:
        raise ValueError(f"cfg: got block_k={config.block_k}, wants a divisor of {step}, which share a scale")
    spec = dataclasses.replace(
        _spec(record, config, record.lhs.dtype),
        SCALES="columns" if rhs_blocks == 1 else "steps",
        LHS_SCALES="rows" if lhs_blocks == 1 else "steps",
        LHS_BLOCKS=lhs_blocks,
        IMPRECISE=None if record.precision == lax.Precision.DEFAULT else config.block_k,
    )
    return multiply(record, record.lhs, spec, config, record.out_dtype)


def gradient_of_lhs(record: GroupedMatmul, cotangent: jax.Array, config: GroupedForward) -> jax.Array:
    """Returns the cotangent's rows times the transposed matrix of their group; 0 for unassigned rows.

    Args:
        record: The canonical arguments.
        cotangent: [M, N] in the dtype of the product's operands.
        config: Tile sizes, programs, warps and stages.
    """
    record = dataclasses.replace(record, left_over="zero")
    spec = _spec(record, config, cotangent.dtype)
    spec = dataclasses.replace(
        spec,
        # The matrices are read transposed by exchanging strides, without a copy.
        CONTRACTED=spec.COLUMNS,
        COLUMNS=spec.CONTRACTED,
        RHS_STRIDES=spec.RHS_STRIDES[::-1],
        SCALE_STRIDES=spec.SCALE_STRIDES[::-1],
        PER_SCALE=spec.PER_SCALE[::-1],
        BIAS=False,
        EXISTING=False,
    )
    return multiply(record, cotangent, spec, config, record.lhs.dtype)


def _spec(record: GroupedMatmul, config: GroupedForward, operand: Any) -> GroupedRowsSpec:
    """Returns the constants of the forward kernel."""
    (rows, contracted), width, scale = record.lhs.shape, columns(record), record.rhs_scale
    blocks = 1 if scale is None else scale.shape[1]
    return GroupedRowsSpec(
        ROWS=rows,
        CONTRACTED=contracted,
        COLUMNS=width,
        MATRICES=record.rhs.shape[0],
        RHS_STRIDES=(1, contracted) if record.transpose_rhs else (width, 1),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        FLATTEN=config.flatten,
        ENTRIES=most_tiles(rows, record.rhs.shape[0], config.block_m),
        PROGRAMS=config.num_programs,
        GROUP_M=GROUP_M,
        SCALES="no" if scale is None else "elements",
        SCALE_STRIDES=(width, 1),
        PER_SCALE=(contracted // blocks, 1),
        SCALE_ELEMENTS=blocks * width,
        LHS_SCALES="no",
        LHS_BLOCKS=1,
        BIAS=record.rhs_bias is not None,
        EXISTING=record.existing_out is not None,
        OPERAND=jnp.dtype(operand).name,
        PRECISION=dot_precision(record),
        WIDEN=widens(operand),
        IMPRECISE=None,
    )


def multiply(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedRowsSpec, config: GroupedForward, dtype: Any
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

    scale = _floats(record.rhs_scale)
    (output,) = launch(
        grouped_gemm_kernel,
        (
            rows[None],
            record.rhs[None],
            as_row(scale),
            None if spec.LHS_SCALES == "no" else as_row(_floats(record.lhs_scale)),
            as_row(record.rhs_bias) if spec.BIAS else None,
            as_row(record.existing_out) if spec.EXISTING else None,
            find_row_tiles(record, spec.BLOCK_M)[None],
        ),
        (Shape((1, spec.ROWS, spec.COLUMNS), dtype),),
        batch=1,
        grid=spec.PROGRAMS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return output[0]


def _floats(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else scale.astype(jnp.float32)
