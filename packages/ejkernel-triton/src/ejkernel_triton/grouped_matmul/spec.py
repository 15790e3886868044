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
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedRowsSpec:
    """Constants of `grouped_gemm_kernel`: M rows, C contracted elements, N columns.

    Attributes:
        ROWS: M.
        CONTRACTED: C.
        COLUMNS: N.
        MATRICES: E.
        RHS_STRIDES: Strides of a matrix along contracted elements and along columns, in elements.
        BLOCK_M: Rows per tile.
        BLOCK_N: Columns per tile.
        BLOCK_K: Contracted elements per step.
        FLATTEN: Whether the loops over tiles and over steps are flattened into one, so that a tile's first copies are
            in flight while the epilogue stores the previous tile.
        ENTRIES: Entries of the tile list.
        PROGRAMS: Programs that share the tiles.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        SCALES: How scales are applied: `"no"`, to `"columns"` of the accumulator, to `"elements"` of the matrix, or to
            the product of each of the `"steps"`.
        SCALE_STRIDES: Strides of the scales along contracted elements and along columns, in elements.
        PER_SCALE: Contracted elements, and columns, per scale.
        SCALE_ELEMENTS: Scales per matrix.
        LHS_SCALES: How scales of rows are applied: `"no"`, to `"rows"` of the accumulator, or to the product of each of
            the `"steps"`.
        LHS_BLOCKS: Scales per row.
        BIAS: Whether there is a bias.
        EXISTING: Whether there is an `existing_out`.
        OPERAND: Dtype of the product's operands.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN: Whether operands are converted to float32 first: the interpreter multiplies the bits of bfloat16.
        IMPRECISE: Contracted elements whose 8-bit products Hopper's matrix unit may sum by itself, with about 14 bits,
            before they are added in float32; None for all.
    """

    ROWS: int
    CONTRACTED: int
    COLUMNS: int
    MATRICES: int
    RHS_STRIDES: tuple[int, int]
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    FLATTEN: bool
    ENTRIES: int
    PROGRAMS: int
    GROUP_M: int
    SCALES: str
    SCALE_STRIDES: tuple[int, int]
    PER_SCALE: tuple[int, int]
    SCALE_ELEMENTS: int
    LHS_SCALES: str
    LHS_BLOCKS: int
    BIAS: bool
    EXISTING: bool
    OPERAND: str
    PRECISION: str
    WIDEN: bool
    IMPRECISE: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatricesSpec:
    """Constants of the kernels that sum over the rows of each group: [M, P]^T [M, Q] -> [P, Q] for every matrix.

    Attributes:
        ROWS: M.
        HEIGHT: P.
        WIDTH: Q.
        BLOCK_P: Rows per tile of the result.
        BLOCK_Q: Columns per tile of the result.
        BLOCK_K: Rows of the operands per step.
        MATRICES: E.
        GROUP_M: Tile rows per swizzle group: they run before the next column of tiles.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN: Whether operands are converted to float32 first, as in `GroupedRowsSpec`.
    """

    ROWS: int
    HEIGHT: int
    WIDTH: int
    BLOCK_P: int
    BLOCK_Q: int
    BLOCK_K: int
    MATRICES: int
    GROUP_M: int
    PRECISION: str
    WIDEN: bool


FLOAT8 = "float8_e4m3fn"
"""Dtype of rows and matrices that tensor cores multiply without conversion."""
MAX_STEP = 128
"""Contracted elements per step, at most."""
MIN_STEP = 32
"""Contracted elements of one 8-bit MMA, and so of the shortest step."""


def blocks_of_scales(record: GroupedMatmul) -> tuple[int, int]:
    """Returns how many scales rows and matrices have along the contracted axis; 1 without scales."""
    left, right = (1 if x is None else x.shape[1] for x in (record.lhs_scale, record.rhs_scale))
    return left, right


def float8_step(record: GroupedMatmul) -> int:
    """Returns the longest step with one scale for 8-bit tensor core products; 0 if the chip or dtypes do not have
    them.
    """
    if record.lhs_scale is None or record.rhs_scale is None:
        return 0
    chip = gpu_of(current_device())
    able = interpreting() or (chip.vendor == "nvidia" and chip.capability >= 89)
    if not able or not str(record.lhs.dtype) == str(record.rhs.dtype) == FLOAT8:
        return 0
    depth = record.lhs.shape[1]
    lengths = [depth // blocks for blocks in blocks_of_scales(record) if blocks > 1]
    common = math.gcd(*lengths) if lengths else MAX_STEP
    step = min(common & -common, MAX_STEP)
    return step if step >= MIN_STEP else 0


def scaled_rows(record: GroupedMatmul) -> GroupedMatmul:
    """Returns the record with scales multiplied into the rows; 8-bit rows become float32."""
    if record.lhs_scale is None:
        return record
    dtype = jnp.float32 if record.lhs.dtype.itemsize == 1 else operand_dtype(record, jnp.float32)
    given: Any = record.lhs
    if isinstance(given, jax.Array):
        lhs = rows(record, given, record.lhs_scale).astype(dtype)
    else:  # a record of shapes only
        lhs = jax.ShapeDtypeStruct(given.shape, dtype)
    return dataclasses.replace(record, lhs=lhs, lhs_scale=None)


def operand_dtype(record: GroupedMatmul, *others: Any) -> Any:
    """Returns the dtype of the product's operands: lhs's, or float32 if the call needs all digits of a wider
    operand.

    Args:
        record: The record.
        *others: Dtypes of the operands that lhs, or the cotangent, is multiplied with.
    """
    asked = product_precision(record.lhs.dtype, record.precision)
    exact = asked in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    wider = any(jnp.promote_types(record.lhs.dtype, x) != record.lhs.dtype for x in others)
    return jnp.dtype(jnp.float32) if exact and wider else record.lhs.dtype


def dot_precision(record: GroupedMatmul) -> str:
    """Returns how tensor cores multiply float32: by default in three products, which keep its digits."""
    if current_device().vendor != "nvidia" or record.precision == lax.Precision.HIGHEST:
        return "ieee"
    return "tf32" if record.precision == lax.Precision.DEFAULT else "tf32x3"


def widens(dtype: Any) -> bool:
    """Returns whether operands of a dtype are converted to float32 first."""
    return interpreting() and jnp.dtype(dtype) != jnp.float32


def as_row(x: jax.Array | None) -> jax.Array | None:
    """Returns an array with a leading batch axis of 1."""
    return None if x is None else x[None]
