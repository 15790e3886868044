"""The compile-time constants of the grouped-matmul kernels; group sizes are not among them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul, rows
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import product_precision
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmSpec:
    """Constants of `grouped_gemm_kernel`: M rows, C contracted elements, N columns.

    Attributes:
        ROWS: M.
        CONTRACTED_SIZE: C.
        COLUMNS: N.
        NUM_MATRICES: E.
        RHS_STRIDES: Strides of a matrix along contracted elements and along columns, in elements.
        BLOCK_M: Rows per tile.
        BLOCK_N: Columns per tile.
        BLOCK_K: Contracted elements per step.
        FLATTEN_LOOPS: Whether the loops over tiles and over steps are flattened into one, so that a tile's first copies
            are in flight while the epilogue stores the previous tile.
        TILE_LIST_LENGTH: Entries of the tile list.
        NUM_PROGRAMS: Programs that share the tiles.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        RHS_SCALE_MODE: How scales are applied: `"no"`, to `"columns"` of the accumulator, to `"elements"` of the
            matrix, or to the product of each of the `"steps"`.
        RHS_SCALE_STRIDES: Strides of the scales along contracted elements and along columns, in elements.
        RHS_SCALE_BLOCK: Contracted elements, and columns, per scale.
        SCALES_PER_MATRIX: Scales per matrix.
        LHS_SCALE_MODE: How scales of rows are applied: `"no"`, to `"rows"` of the accumulator, or to the product of
            each of the `"steps"`.
        LHS_SCALES_PER_ROW: Scales per row.
        HAS_BIAS: Whether there is a bias.
        HAS_EXISTING_OUT: Whether there is an `existing_out`.
        OPERAND_DTYPE: Dtype of the product's operands.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
        MAX_IMPRECISE_ACC: Contracted elements whose 8-bit products Hopper's matrix unit may sum by itself, with about
            14 bits, before they are added in float32; None for all.
    """

    ROWS: int
    CONTRACTED_SIZE: int
    COLUMNS: int
    NUM_MATRICES: int
    RHS_STRIDES: tuple[int, int]
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    FLATTEN_LOOPS: bool
    TILE_LIST_LENGTH: int
    NUM_PROGRAMS: int
    GROUP_M: int
    RHS_SCALE_MODE: str
    RHS_SCALE_STRIDES: tuple[int, int]
    RHS_SCALE_BLOCK: tuple[int, int]
    SCALES_PER_MATRIX: int
    LHS_SCALE_MODE: str
    LHS_SCALES_PER_ROW: int
    HAS_BIAS: bool
    HAS_EXISTING_OUT: bool
    OPERAND_DTYPE: str
    PRECISION: str
    WIDEN_TO_FLOAT32: bool
    MAX_IMPRECISE_ACC: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedRhsGradientSpec:
    """Constants of the kernels that sum over the rows of each group: [M, P]^T [M, Q] -> [P, Q] for every matrix.

    Attributes:
        ROWS: M.
        OUTPUT_ROWS: P.
        OUTPUT_COLUMNS: Q.
        BLOCK_OUTPUT_ROWS: Rows per tile of the result.
        BLOCK_OUTPUT_COLUMNS: Columns per tile of the result.
        BLOCK_K: Rows of the operands per step.
        NUM_MATRICES: E.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted to float32 first, as in `GroupedGemmSpec`.
    """

    ROWS: int
    OUTPUT_ROWS: int
    OUTPUT_COLUMNS: int
    BLOCK_OUTPUT_ROWS: int
    BLOCK_OUTPUT_COLUMNS: int
    BLOCK_K: int
    NUM_MATRICES: int
    GROUP_M: int
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


FLOAT8_OPERAND_DTYPE = "float8_e4m3fn"
"""Dtype of rows and matrices that tensor cores multiply without conversion."""
MAX_FLOAT8_STEP_ELEMENTS = 128
"""Contracted elements per step, at most."""
MIN_FLOAT8_STEP_ELEMENTS = 32
"""Contracted elements of one 8-bit MMA, and so of the shortest step."""


def num_scales_along_contraction(record: GroupedMatmul) -> tuple[int, int]:
    """Returns how many scales rows and matrices have along the contracted axis; 1 without scales."""
    left, right = (1 if x is None else x.shape[1] for x in (record.lhs_scale, record.rhs_scale))
    return left, right


def longest_float8_step(record: GroupedMatmul) -> int:
    """Returns the longest step with one scale for 8-bit tensor core products; 0 if the chip or dtypes do not have
    them.
    """
    if record.lhs_scale is None or record.rhs_scale is None:
        return 0
    chip = gpu_of(current_device())
    has_float8_dot = is_interpreting() or (chip.vendor == "nvidia" and chip.capability >= 89)
    if not has_float8_dot or not str(record.lhs.dtype) == str(record.rhs.dtype) == FLOAT8_OPERAND_DTYPE:
        return 0
    contracted = record.lhs.shape[1]
    scale_block_lengths = [contracted // blocks for blocks in num_scales_along_contraction(record) if blocks > 1]
    common_length = math.gcd(*scale_block_lengths) if scale_block_lengths else MAX_FLOAT8_STEP_ELEMENTS
    step = min(common_length & -common_length, MAX_FLOAT8_STEP_ELEMENTS)
    return step if step >= MIN_FLOAT8_STEP_ELEMENTS else 0


def dequantize_lhs(record: GroupedMatmul) -> GroupedMatmul:
    """Returns the record with scales multiplied into the rows; 8-bit rows become float32."""
    if record.lhs_scale is None:
        return record
    dtype = jnp.float32 if record.lhs.dtype.itemsize == 1 else choose_operand_dtype(record, jnp.float32)
    lhs_array: Any = record.lhs
    if isinstance(lhs_array, jax.Array):
        lhs = rows(record, lhs_array, record.lhs_scale).astype(dtype)
    else:  # a record of shapes only
        lhs = jax.ShapeDtypeStruct(lhs_array.shape, dtype)
    return dataclasses.replace(record, lhs=lhs, lhs_scale=None)


def choose_operand_dtype(record: GroupedMatmul, *other_dtypes: Any) -> Any:
    """Returns the dtype of the product's operands: lhs's, or float32 if the call needs all digits of a wider
    operand.

    Args:
        record: The record.
        *other_dtypes: Dtypes of the operands that lhs, or the cotangent, is multiplied with.
    """
    asked = product_precision(record.lhs.dtype, record.precision)
    needs_float32 = asked in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    has_wider_operand = any(jnp.promote_types(record.lhs.dtype, x) != record.lhs.dtype for x in other_dtypes)
    return jnp.dtype(jnp.float32) if needs_float32 and has_wider_operand else record.lhs.dtype


def choose_dot_precision(record: GroupedMatmul) -> str:
    """Returns how tensor cores multiply float32: by default in three products, which keep its digits."""
    if current_device().vendor != "nvidia" or record.precision == lax.Precision.HIGHEST:
        return "ieee"
    return "tf32" if record.precision == lax.Precision.DEFAULT else "tf32x3"


def converts_to_float32(dtype: Any) -> bool:
    """Returns whether operands of a dtype are converted to float32 first."""
    return is_interpreting() and jnp.dtype(dtype) != jnp.float32


def add_batch_axis(x: jax.Array | None) -> jax.Array | None:
    """Returns an array with a leading batch axis of 1."""
    return None if x is None else x[None]
