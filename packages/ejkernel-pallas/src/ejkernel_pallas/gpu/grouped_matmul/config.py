"""Configurations of the grouped-matmul kernels on Hopper: their types, the heuristics, and the candidates."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, as_grouped_matmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.kinds import average_rows_per_group
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGrouped:
    """Configuration of the kernel that multiplies rows with matrices (kernels/grouped_matmul.py).

    Attributes:
        block_n: Columns per tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        output_buffers: Output buffers per warpgroup in shared memory, of 64 rows, that await their copy to device
            memory.
        group_m: Tile rows, over all blocks of a cluster, per swizzle group: they run before the next column of tiles.
        cluster_m: Blocks per cluster along rows, 1 or 2: they share the loads of a matrix.
        cluster_n: Blocks per cluster along columns, 1 or 2: they share the loads of rows.
        overlap: Whether a 16-bit tile is stored during the first products of the next one; until then it stays in
            registers.
        half_columns: Whether the two warpgroups multiply a tile of at most 64 rows by half of its columns each.
    """

    block_n: int
    stages: int
    output_buffers: int
    group_m: int
    cluster_m: int
    cluster_n: int
    overlap: bool
    half_columns: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGroupedBackward(HopperGrouped):
    """Configuration of the backward pass: the fields of the gradient of lhs, and those of the gradient of rhs.

    Attributes:
        rhs_block_n: Columns per tile of a matrix's gradient.
        rhs_stages: Pipeline stages of that kernel.
        rhs_output_buffers: Output buffers per warpgroup of that kernel.
        rhs_group_m: Tile rows per swizzle group of that kernel.
        rhs_cluster_m: Blocks per cluster along rows.
        rhs_cluster_n: Blocks per cluster along columns.
    """

    rhs_block_n: int
    rhs_stages: int
    rhs_output_buffers: int
    rhs_group_m: int
    rhs_cluster_m: int
    rhs_cluster_n: int

    @property
    def rhs_gradient_config(self) -> HopperGrouped:
        """Returns the configuration of the kernel of matrix gradients."""
        names = [field.name for field in dataclasses.fields(HopperGrouped) if field.name not in ROW_KERNEL_ONLY_FIELDS]
        return HopperGrouped(
            **{name: getattr(self, f"rhs_{name}") for name in names}, overlap=False, half_columns=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperFp8:
    """Configuration of the kernel for operands of 8 bits with scales (kernels/grouped_matmul_fp8.py).

    Attributes:
        block_n: Columns per tile.
        product_n: Columns per WGMMA product, a divisor of those of a tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        output_buffers: Output buffers per warpgroup in shared memory, of 64 rows, that await their copy to device
            memory.
        group_m: Tile rows per swizzle group: they run before the next column of tiles.
        split_by_columns: Whether a warpgroup has all rows of a tile and half of its columns, if these are two products.
            Tiles of at most 64 rows then take half of the products, and tensor cores never accumulate over all steps.
        dynamic_schedule: Whether blocks get their next tile from an atomic counter; otherwise they take every
            `num_blocks`-th tile.
    """

    block_n: int
    product_n: int
    stages: int
    output_buffers: int
    group_m: int
    split_by_columns: bool
    dynamic_schedule: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGated:
    """Configuration of the kernel of a gated product (kernels/gated_grouped_matmul.py).

    Attributes:
        block_n: Output columns per tile; with a gate it multiplies as many columns of the gate and of the factor.
        stages: Pipeline stages: steps whose operands are in shared memory.
        output_buffers: Output buffers per warpgroup in shared memory, of 64 rows, that await their copy to device
            memory.
        group_m: Tile rows per swizzle group: they run before the next column of tiles.
        single_warpgroup: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    block_n: int
    stages: int
    output_buffers: int
    group_m: int
    single_warpgroup: bool


ROW_KERNEL_ONLY_FIELDS = ("overlap", "half_columns")
"""Fields that the kernel of matrix gradients does not have."""

PUBLIC_FIELDS = {"block_n": "block_n", "num_stages": "stages"}
"""Maps fields of the public configuration to fields of these."""


class TileOptions(NamedTuple):
    """Columns per tile, pipeline stages, output buffers, tile rows per swizzle group, blocks per cluster along rows and
    along columns, `overlap` and `half_columns`.
    """

    block_n: int
    stages: int
    output_buffers: int
    group_m: int
    cluster_m: int = 1
    cluster_n: int = 1
    overlap: bool = False
    half_columns: bool = False

    @property
    def config_fields(self) -> dict[str, Any]:
        """Returns the sizes by the field names of a configuration."""
        names = ("block_n", "stages", "output_buffers", "group_m", "cluster_m", "cluster_n", "overlap", "half_columns")
        return dict(zip(names, self, strict=True))


HALF_COLUMNS_TILE = TileOptions(256, 4, 2, 16, half_columns=True)
"""The tile for groups of few rows: each warpgroup has half of a matrix's columns, so both have work in every tile.

On an H100, as a fraction of the bandwidth that XLA reads with: K2048 N1536 G128 with 64, 128, 256 and 512 rows 0.83,
0.84, 0.90 and 0.90, the first of `ROW_KERNEL_TILES` 0.76, 0.77, 0.82 and 0.83; K4096 N14336 G8 with 64 rows 0.91 and
0.88.
"""

ROW_KERNEL_TILES = (
    TileOptions(256, 4, 2, 16),
    TileOptions(256, 4, 2, 8),
    TileOptions(256, 4, 2, 16, overlap=True),
    TileOptions(256, 4, 2, 8, overlap=True),
    HALF_COLUMNS_TILE,
    TileOptions(256, 4, 2, 4, 2, 1),
)
"""The tile candidates of the kernels of rows. The first tile passed all conformance cases on a chip; the results of the
other tiles were compared with it.

On an H200, M65536 K2048 N1536 G128, forward: 540, 554, 575, 569, 558 and 547 TFLOP/s.
"""

NARROW_ROW_KERNEL_TILES = (TileOptions(128, 5, 4, 8), TileOptions(128, 5, 4, 8, overlap=True))
"""Tiles if the last tile of 256 columns would be half empty: 540 and 548 TFLOP/s with 1408 columns, instead of 504."""

HALF_COLUMNS_MAX_MEAN_ROWS = 32
"""The mean number of rows per group up to which `HALF_COLUMNS_TILE` comes first: with 64, K4096 N14336 G8, both take
the same time.
"""

MATRIX_GRADIENT_TILES = (
    TileOptions(256, 4, 2, 8),
    TileOptions(256, 4, 2, 16),
    TileOptions(256, 4, 2, 8, 1, 2),
    TileOptions(256, 4, 2, 8, 2, 1),
)
"""Tiles of the kernel of matrix gradients. 571 TFLOP/s for the same shape with the first on an H200. Clusters gain
nothing.
"""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGrouped:
    """Returns the configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def batch_invariant(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGrouped:
    """Returns the tiles for calls in a `batch_invariant` block, which fit the batch: in all of them WGMMA adds 16
    contracted elements at a time, from the first to the last (docs/lab/grouped_matmul_gpu.md).
    """
    return heuristic(record, device, direction)


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGrouped, ...]:
    """Returns the configurations worth measuring, the best first."""
    is_narrow = 0 < (columns(record) if direction == "forward" else record.lhs.shape[1]) % 256 <= 128
    row_tiles = (*NARROW_ROW_KERNEL_TILES, *ROW_KERNEL_TILES) if is_narrow else ROW_KERNEL_TILES
    if average_rows_per_group(record) <= HALF_COLUMNS_MAX_MEAN_ROWS:
        row_tiles = tuple(dict.fromkeys((HALF_COLUMNS_TILE, *row_tiles)))
    if direction == "forward":
        return tuple(HopperGrouped(**tile.config_fields) for tile in row_tiles)
    tile_pairs = [(row_tiles[0], tile) for tile in MATRIX_GRADIENT_TILES] + [
        (tile, MATRIX_GRADIENT_TILES[0]) for tile in row_tiles[1:]
    ]
    return tuple(_backward_config(*pair) for pair in tile_pairs)


def _backward_config(lhs_gradient_tile: TileOptions, rhs_gradient_tile: TileOptions) -> HopperGroupedBackward:
    rhs_fields = {
        f"rhs_{name}": value
        for name, value in rhs_gradient_tile.config_fields.items()
        if name not in ROW_KERNEL_ONLY_FIELDS
    }
    return HopperGroupedBackward(**lhs_gradient_tile.config_fields, **rhs_fields)


def _fp8_tile(
    block_n: int, stages: int, output_buffers: int, *, split_by_columns: bool = False, dynamic_schedule: bool = False
) -> HopperFp8:
    fields = {"block_n": block_n, "product_n": 128, "stages": stages, "output_buffers": output_buffers, "group_m": 16}
    return HopperFp8(**fields, split_by_columns=split_by_columns, dynamic_schedule=dynamic_schedule)


FP8_COLUMN_SPLIT_TILE = _fp8_tile(256, 3, 4, split_by_columns=True, dynamic_schedule=True)
"""A tile whose warpgroups have half of the columns each, with a counter of tiles.

On one H100, relative to bfloat16, and `FP8_ROW_SPLIT_TILE` in comparison: M65536 K2048 N1536 G128 1.61 and 1.45 with
scales of 128 x 128, 1.23 and 1.12 with one per column and block; M32768 K2048 N1408 G64 1.53 and 1.43, 1.28 and 1.17;
M32768 K7168 N4096 G32 1.72 and 1.68, 1.22 and 1.16. With scales per row and column 1.73, 1.66 and 1.77; by rows 1.61,
1.58 and 1.80.
"""

FP8_ROW_SPLIT_TILE = _fp8_tile(256, 3, 4)

FP8_TENSOR_CORE_SUM_TILES = (FP8_ROW_SPLIT_TILE, _fp8_tile(256, 4, 1), FP8_COLUMN_SPLIT_TILE)
"""Candidates if tensor cores may accumulate over all contracted elements. The last one does not, and is 5% faster in
the first of these shapes and 5% slower in the last.
"""


def fp8_heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperFp8:
    """Returns the configuration of a call without a chosen or tuned one."""
    return fp8_candidates(record, device, direction)[0]


def fp8_candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperFp8, ...]:
    """Returns the configurations worth measuring, the best first."""
    return FP8_TENSOR_CORE_SUM_TILES if sums_on_tensor_cores(record) else (FP8_COLUMN_SPLIT_TILE, FP8_ROW_SPLIT_TILE)


def sums_on_tensor_cores(record: GroupedMatmul) -> bool:
    """Returns whether tensor cores may accumulate over all contracted elements: each row and column has one scale,
    and the call does not ask for more precision.
    """
    assert record.lhs_scale is not None  # a requirement of the kernel
    assert record.rhs_scale is not None
    one = record.lhs_scale.shape[1] == record.rhs_scale.shape[1] == 1
    return one and record.precision == lax.Precision.DEFAULT


def _gated_tile(
    block_n: int, stages: int, output_buffers: int, group_m: int, *, single_warpgroup: bool = False
) -> HopperGated:
    return HopperGated(
        block_n=block_n,
        stages=stages,
        output_buffers=output_buffers,
        group_m=group_m,
        single_warpgroup=single_warpgroup,
    )


GATED_TILES = (
    _gated_tile(128, 4, 2, 16),
    _gated_tile(128, 4, 2, 24),
    _gated_tile(128, 4, 2, 8),
    _gated_tile(64, 6, 1, 8),
)
"""Tiles, the best first.

On an H200, M65536 K2048 F768 G128, gathered: the first two 0.725 and 0.710 ms in one run, the first and the third 0.698
and 0.736 in another. The last has been compared there, not timed.
"""

SINGLE_WARPGROUP_TILES = tuple(dataclasses.replace(tile, single_warpgroup=True) for tile in GATED_TILES[:1])
"""Tiles for groups of few rows: 0.240 ms with 32 per group instead of 0.253, but 0.748 with 512 instead of 0.725."""

SINGLE_WARPGROUP_MAX_MEAN_ROWS = 64
"""The mean number of rows per group up to which they come first."""


def gated_heuristic(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGated:
    """Returns the configuration of a call without a chosen or tuned one."""
    return gated_candidates(record, device, direction)[0]


def gated_candidates(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGated, ...]:
    """Returns the configurations worth measuring, the best first."""
    few = average_rows_per_group(plain_product_record(record)) <= SINGLE_WARPGROUP_MAX_MEAN_ROWS
    tiles = (*SINGLE_WARPGROUP_TILES, *GATED_TILES) if few else (*GATED_TILES, *SINGLE_WARPGROUP_TILES)
    # Without a gate, a product of as many columns gives twice as many columns of the output.
    return tiles if record.gated else tuple(dataclasses.replace(tile, block_n=2 * tile.block_n) for tile in tiles)


def plain_product_record(record: GatedGroupedMatmul) -> GroupedMatmul:
    """Returns the product's record, with the shape of the gathered rows, which are never stored."""
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    return as_grouped_matmul(
        record, jax.ShapeDtypeStruct((rows, record.lhs.shape[1]), record.lhs.dtype), record.lhs.dtype
    )
