"""The compile-time constants of the grouped-matmul kernels on Hopper, their shared memory, and their refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.row_tiles import most_tiles
from ejkernel.ops.params import given_values
from ejkernel_pallas.gpu.grouped_matmul.config import (
    HopperGated,
    HopperGrouped,
    HopperScaled,
    TileSizes,
    product_of,
    quick,
)
from ejkernel_pallas.gpu.hopper.row_gathers import LARGEST
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY, SWIZZLE_COLUMNS, WGMMA_M

STEP = 64
"""Contracted elements per step of 16 bits: a swizzled row of 128 bytes."""
WARPGROUPS = 2
"""Consumer warpgroups."""
REGISTERS, FETCHING_REGISTERS = 240, 24
"""Registers per thread of a consumer and of the producer. A multiprocessor has 65536."""
GATHERING = (232, 40)
"""The same for gathered rows: a producer thread keeps the addresses of eight rows."""
COPIED_BLOCKS = 4
"""Blocks of contracted elements whose scales of a row are copied together: 16 bytes, the smallest bulk copy."""
LEAD = 2
"""Products of a tile that run while the previous tile is stored."""
RESERVE = 2 * 1024
"""Bytes of shared memory for mbarriers and Mosaic's own use."""
LINE = 128
"""Bytes of a swizzled row."""
BLOCK_M = WARPGROUPS * WGMMA_M
"""Rows per tile: 64 for each consumer warpgroup."""


FLOAT8 = "float8_e4m3fn"
"""The dtype of rows and matrices."""
SCALED_STEP = LINE
"""Contracted elements per step: a swizzled row of 8 bits."""
MOST_COLUMNS = 256
"""The largest number of columns per tile: one copy loads their scales, and a warpgroup's registers hold their sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """Constants of the kernels of rows with operands of 8 bits and scales.

    Attributes:
        lhs_blocks: Blocks of contracted elements with a scale each, per row.
        rhs_blocks: The same per column.
        product_n: Columns per WGMMA product.
        quick: Whether tensor cores accumulate over all steps.
        by_columns: Whether a warpgroup has all rows of a tile, and the columns of one product.
        dynamic: Whether blocks get their next tile from an atomic counter.
    """

    lhs_blocks: int
    rhs_blocks: int
    product_n: int
    quick: bool
    by_columns: bool
    dynamic: bool

    @property
    def copies_rows(self) -> bool:
        """Returns whether scales of rows are copied in bulk: a warpgroup with all rows of a tile has too many for
        loads, whose addresses would take registers.
        """
        return self.by_columns and self.lhs_blocks > 1 and self.lhs_blocks % COPIED_BLOCKS == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Constants of the kernels of rows with a gated matrix, the first half of whose columns gates the second half.

    Attributes:
        activation: The gate's activation function: "silu" or "gelu".
        gathers: Whether rows are gathered by index.
        alone: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    activation: str
    gathers: bool
    alone: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Constants of a kernel.

    Attributes:
        rows: M.
        contracted: Contracted elements in the kernels of rows; rows of the result in the kernel of matrix gradients.
        columns: Columns of the result.
        matrices: E.
        transposed: Whether the columns of the result are the first axis of matrices.
        dtype: Dtype of the operands.
        out: Dtype of the result.
        tile: The configuration.
        scaling: Constants for 8-bit operands; None for 16-bit ones.
        gate: Constants of the gated product; None for the plain product.
    """

    rows: int
    contracted: int
    columns: int
    matrices: int
    transposed: bool
    dtype: Any
    out: Any
    tile: HopperGrouped
    scaling: Scaling | None = None
    gate: Gate | None = None

    @property
    def gathers(self) -> bool:
        """Returns whether rows are gathered."""
        return self.gate is not None and self.gate.gathers

    @property
    def dynamic(self) -> bool:
        """Returns whether blocks get their next tile from a counter; otherwise they take every `blocks`-th tile."""
        return self.scaling is not None and self.scaling.dynamic

    @property
    def registers(self) -> tuple[int, int]:
        """Returns registers per thread of a consumer, and of the producer."""
        return GATHERING if self.gathers else (REGISTERS, FETCHING_REGISTERS)

    @property
    def panels(self) -> int:
        """Returns panels of 64 columns in a stage of a gated matrix."""
        return 2 * self.tile.block_n // SWIZZLE_COLUMNS

    @property
    def step(self) -> int:
        """Returns contracted elements per step in the kernels of rows: a swizzled row."""
        return LINE // jnp.dtype(self.dtype).itemsize

    @property
    def part(self) -> int:
        """Returns the columns of a result per output buffer: a swizzled row."""
        return LINE // jnp.dtype(self.out).itemsize

    @property
    def members(self) -> int:
        """Returns blocks per cluster."""
        return self.tile.cluster_m * self.tile.cluster_n

    @property
    def across(self) -> int:
        """Returns the number of tiles of columns, over all members of a cluster."""
        return cdiv(self.columns, self.tile.block_n * self.tile.cluster_n)

    @property
    def down(self) -> int:
        """Returns the number of tile rows per matrix, over all members of a cluster, in the kernel of matrix
        gradients.
        """
        return cdiv(self.contracted, BLOCK_M * self.tile.cluster_m)

    @property
    def overlapped(self) -> bool:
        """Returns whether tiles are stored during the first products of the next one."""
        return self.tile.overlap and self.out.itemsize == 2

    @property
    def splits(self) -> bool:
        """Returns whether the last tiles may be split by columns into two work items each."""
        product = self.scaling.product_n if self.scaling and not self.scaling.quick else SWIZZLE_COLUMNS
        whole = self.tile.block_n % (2 * product) == 0
        return whole and not (self.tile.overlap or self.tile.halves or self.tail or self.members > 1)

    @property
    def even(self) -> bool:
        """Returns whether tiles divide the output's columns."""
        return self.columns == self.across * self.tile.block_n * self.tile.cluster_n

    @property
    def tail(self) -> int:
        """Returns the columns of a partial last tile, or 0 if there is none."""
        return self.columns % self.tile.block_n

    @property
    def steps(self) -> int:
        """Returns the steps per tile in the kernels of rows."""
        return self.contracted // self.step

    @property
    def entries(self) -> int:
        """Returns entries of the tile list."""
        return most_tiles(self.rows, self.matrices, BLOCK_M)


def make_spec(record: GroupedMatmul, params: HopperGrouped, out: Any) -> GroupedSpec:
    """Returns the constants of the forward kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    if params.block_n not in (64, 128, 192, 256):
        raise ValueError(f"cfg: got block_n={params.block_n}, the Mosaic GPU kernels want 64, 128, 192 or 256")
    if params.stages < 2 or params.slots < 1 or params.band < 1:
        raise ValueError(f"cfg: got {given_values(params)}, wants at least 2 stages, a slot and a band of 1")
    if (params.cluster_m, params.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
        raise ValueError(f"cfg: got {given_values(params)}, wants clusters of 1 by 1, 1 by 2 or 2 by 1 blocks")
    if shared_bytes(params) > SHARED_MEMORY - RESERVE:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return GroupedSpec(
        rows=record.lhs.shape[0],
        contracted=record.lhs.shape[1],
        columns=columns(record),
        matrices=record.rhs.shape[0],
        transposed=record.transpose_rhs,
        dtype=jnp.dtype(record.lhs.dtype),
        out=jnp.dtype(out),
        tile=params,
    )


def shared_bytes(params: HopperGrouped) -> int:
    """Returns shared memory of a kernel, without barriers."""
    # Operands have 16 bits; an output buffer has a swizzled row of 128 bytes for each of 64 rows, for any dtype.
    stage = (BLOCK_M + params.block_n) * STEP * 2
    return params.stages * stage + WARPGROUPS * params.slots * WGMMA_M * LINE


def reasons(record: GroupedMatmul) -> list[str]:
    """Returns the reasons to refuse a record that `Requires` cannot express."""
    rows, contracted = record.lhs.shape
    found = []
    if rows % 8 or rows < WGMMA_M:
        found.append(f"{rows} rows are not a multiple of 8, or fewer than {WGMMA_M}")
    for name, size in (("contracted elements", contracted), ("columns", columns(record))):
        if size % SWIZZLE_COLUMNS or not size:
            found.append(f"{size} {name} are not a multiple of {SWIZZLE_COLUMNS}")
    if record.rhs.dtype != record.lhs.dtype:
        found.append(f"rhs has dtype {record.rhs.dtype}, lhs has {record.lhs.dtype}")
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        found.append(f"preferred_element_type {record.out_dtype} does not have 16 or 32 bits")
    return found


def make_scaled_spec(record: GroupedMatmul, params: HopperScaled) -> GroupedSpec:
    """Returns the constants of the kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    given = given_values(params)
    size, product = params.block_n, params.product_n
    if not 0 < size <= MOST_COLUMNS or size % SWIZZLE_COLUMNS:
        raise ValueError(f"cfg: got block_n={size}, wants a multiple of {SWIZZLE_COLUMNS} up to {MOST_COLUMNS}")
    # An output buffer has 64 columns of 16 bits, or 32 of 32 bits.
    part = LINE // jnp.dtype(record.out_dtype).itemsize
    if product <= 0 or product % part or size % product:
        raise ValueError(f"cfg: got product_n={product}, wants a divisor of block_n={size} and a multiple of {part}")
    if params.stages < 2 or params.slots < 1 or params.band < 1:
        raise ValueError(f"cfg: got {given}, wants at least 2 stages, a slot and a band of 1")
    if scaled_shared_bytes(params) > SHARED_MEMORY - RESERVE:
        raise ValueError(f"cfg: {given} takes more than the {SHARED_MEMORY} bytes of shared memory")
    assert record.lhs_scale is not None  # a requirement of the kernel
    assert record.rhs_scale is not None
    by_columns = params.by_columns and size == WARPGROUPS * product
    return GroupedSpec(
        rows=record.lhs.shape[0],
        contracted=record.lhs.shape[1],
        columns=columns(record),
        matrices=record.rhs.shape[0],
        transposed=True,
        dtype=jnp.dtype(record.lhs.dtype),
        out=jnp.dtype(record.out_dtype),
        tile=HopperGrouped(**TileSizes(size, params.stages, params.slots, params.band).fields),
        scaling=Scaling(
            lhs_blocks=record.lhs_scale.shape[1],
            rhs_blocks=record.rhs_scale.shape[1],
            product_n=product,
            quick=quick(record) and not by_columns,
            by_columns=by_columns,
            dynamic=params.dynamic,
        ),
    )


def share_scales(scales: jax.Array, product_n: int) -> jax.Array:
    """Returns whether all columns of every product share their scale, int32 [1], as with matrix scales of 128 x 128.

    Args:
        scales: Float32 [E, blocks, N].
        product_n: Columns per product.
    """
    size = scales.shape[2]
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -size % product_n)), mode="edge")
    products = scales.reshape(*scales.shape[:2], -1, product_n)
    return jnp.all(products == products[..., :1]).astype(jnp.int32)[None]


def scaled_shared_bytes(params: HopperScaled) -> int:
    """Returns shared memory of the kernel, without barriers."""
    scales = (params.stages + 1) * params.block_n * 4
    if params.by_columns:
        scales += params.stages * BLOCK_M * COPIED_BLOCKS * 4
    return (
        params.stages * (BLOCK_M + params.block_n) * SCALED_STEP + scales + WARPGROUPS * params.slots * WGMMA_M * LINE
    )


def scaled_reasons(record: GroupedMatmul) -> list[str]:
    """Returns the reasons to refuse a record that `Requires` cannot express."""
    rows, contracted = record.lhs.shape
    found = []
    if str(record.rhs.dtype) != FLOAT8:
        found.append(f"rhs has dtype {record.rhs.dtype}, wants {FLOAT8}")
    if record.lhs_scale is None or record.rhs_scale is None:
        return [*found, "lhs_scale or rhs_scale is None, wants both"]
    if not record.transpose_rhs:
        found.append("matrices lie with their contracted elements first; WGMMA reads 8 bits along them (transpose_rhs)")
    if rows < WGMMA_M:
        found.append(f"{rows} rows are fewer than {WGMMA_M}")
    if columns(record) % SWIZZLE_COLUMNS or not columns(record):
        found.append(f"{columns(record)} columns are not a multiple of {SWIZZLE_COLUMNS}")
    for name, blocks in (("rows", record.lhs_scale.shape[1]), ("matrices", record.rhs_scale.shape[1])):
        if contracted % (blocks * SCALED_STEP) or not contracted:
            found.append(
                f"{contracted // blocks} contracted elements per scale of {name} are not a multiple of {SCALED_STEP}"
            )
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        found.append(f"preferred_element_type {record.out_dtype} does not have 16 or 32 bits")
    return found


def make_gated_spec(record: GatedGroupedMatmul, params: HopperGated) -> GroupedSpec:
    """Returns the constants of the kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    if params.block_n not in (64, 128):
        raise ValueError(f"cfg: got block_n={params.block_n}, the gated Mosaic GPU kernel wants 64 or 128")
    product = product_of(record)
    # Shared memory has the gate's and the values' columns of a tile.
    tile = HopperGrouped(**TileSizes(2 * params.block_n, params.stages, params.slots, params.band).fields)
    made = make_spec(product, tile, record.lhs.dtype)
    return dataclasses.replace(
        made,
        columns=made.columns // 2,
        tile=dataclasses.replace(tile, block_n=params.block_n),
        gate=Gate(activation=record.activation, gathers=record.indices is not None, alone=params.alone),
    )


def gated_reasons(record: GatedGroupedMatmul) -> list[str]:
    """Returns the reasons to refuse a record that `Requires` cannot express."""
    product, size = product_of(record), record.lhs.size * record.lhs.dtype.itemsize
    found = reasons(product)
    half = record.rhs.shape[2] // 2
    if half % SWIZZLE_COLUMNS:
        found.append(f"{half} columns of the output are not a multiple of {SWIZZLE_COLUMNS}")
    if record.indices is not None and size > LARGEST:
        found.append(f"lhs has {size} bytes, more than the {LARGEST} from which rows can be gathered")
    return found
