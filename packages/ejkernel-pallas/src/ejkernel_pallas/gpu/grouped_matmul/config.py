"""Configurations of the grouped-matmul kernels on Hopper: the rule for calls without a measured one, and candidates."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, product_record
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.kinds import average_rows
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGrouped:
    """Configuration of the kernel that multiplies rows with matrices (kernels/grouped_matmul.py).

    Attributes:
        block_n: Columns of a tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        slots: Parts of a warpgroup's output, of 64 rows, that are in shared memory on their way out.
        band: Tiles of rows, or of all rows of a cluster, that are gone down before the next column.
        cluster_m: Blocks of a cluster below one another, 1 or 2: they read the part of a matrix that both have once.
        cluster_n: Blocks of a cluster next to each other, 1 or 2: they read the rows that both have once.
        overlap: Whether a tile of 16 bits is written while the first products of the next one run, for which it stays
            in registers.
        halves: Whether tiles of at most 64 rows are multiplied by halves of their columns, one per warpgroup.
    """

    block_n: int
    stages: int
    slots: int
    band: int
    cluster_m: int
    cluster_n: int
    overlap: bool
    halves: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGroupedBackward(HopperGrouped):
    """Configuration of the backward pass: the fields of the gradient of lhs, and those of the gradient of rhs.

    Attributes:
        rhs_block_n: Columns of a tile of a matrix's gradient.
        rhs_stages: Pipeline stages of that kernel.
        rhs_slots: Parts of a warpgroup's output on their way out.
        rhs_band: Tiles of rows that are gone down before the next column.
        rhs_cluster_m: Blocks of a cluster below one another.
        rhs_cluster_n: Blocks of a cluster next to each other.
    """

    rhs_block_n: int
    rhs_stages: int
    rhs_slots: int
    rhs_band: int
    rhs_cluster_m: int
    rhs_cluster_n: int

    @property
    def rhs(self) -> HopperGrouped:
        """Returns the configuration of the kernel that owns matrices."""
        names = [field.name for field in dataclasses.fields(HopperGrouped) if field.name not in ROWS_ONLY]
        return HopperGrouped(**{name: getattr(self, f"rhs_{name}") for name in names}, overlap=False, halves=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperScaled:
    """Configuration of the kernel for operands of 8 bits with scales (kernels/grouped_matmul_fp8.py).

    Attributes:
        block_n: Columns of a tile.
        product_n: Columns of a product, which divide those of a tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        slots: Parts of a warpgroup's output, of 64 rows, that are in shared memory on their way out.
        band: Tiles of rows that are gone down before the next column.
        by_columns: Whether a warpgroup has all rows of a tile, and half of its columns, where these are two products.
            Tiles of at most 64 rows then take half of the products, and tensor cores never sum over all steps.
        dynamic: Whether a counter gives blocks the number of their next tile; else they take every `blocks`-th.
    """

    block_n: int
    product_n: int
    stages: int
    slots: int
    band: int
    by_columns: bool
    dynamic: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGated:
    """Configuration of the kernel of a gated product (kernels/gated_grouped_matmul.py).

    Attributes:
        block_n: Columns of a tile of the output; as many of the gate and of the others are multiplied.
        stages: Pipeline stages: steps whose operands are in shared memory.
        slots: Parts of a warpgroup's output, of 64 rows, that are in shared memory on their way out.
        band: Tiles of rows that are gone down before the next column.
        alone: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    block_n: int
    stages: int
    slots: int
    band: int
    alone: bool


ROWS_ONLY = ("overlap", "halves")
"""Fields that the kernel that owns matrices does not have."""

PUBLIC_FIELDS = {"block_n": "block_n", "num_stages": "stages"}
"""Public configuration field -> field of these."""


class TileSizes(NamedTuple):
    """Columns of a tile, stages, slots, band, and blocks of a cluster below one another and next to each other."""

    n: int
    stages: int
    slots: int
    band: int
    below: int = 1
    beside: int = 1
    overlap: bool = False
    halves: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Returns by the names of a configuration."""
        names = ("block_n", "stages", "slots", "band", "cluster_m", "cluster_n", "overlap", "halves")
        return dict(zip(names, self, strict=True))


HALVES = TileSizes(256, 4, 2, 16, halves=True)
"""Where groups have few rows: each warpgroup has half of a matrix's columns, and no tile has rows for the other alone.

On an H100, of the bandwidth that XLA reads with: K2048 N1536 G128 with 64, 128, 256 and 512 rows 0.83, 0.84, 0.90 and
0.90, the first of `ROW_TILES` 0.76, 0.77, 0.82 and 0.83; K4096 N14336 G8 with 64 rows 0.91 and 0.88.
"""

ROW_TILES = (
    TileSizes(256, 4, 2, 16),
    TileSizes(256, 4, 2, 8),
    TileSizes(256, 4, 2, 16, overlap=True),
    TileSizes(256, 4, 2, 8, overlap=True),
    HALVES,
    TileSizes(256, 4, 2, 4, 2, 1),
)
"""Tiles of the kernels of rows. The first has passed the whole suite on a chip; the others' values were compared there.

On an H200, M65536 K2048 N1536 G128, forward: 540, 554, 575, 569, 558 and 547 TFLOP/s.
"""

NARROW = (TileSizes(128, 5, 4, 8), TileSizes(128, 5, 4, 8, overlap=True))
"""Where the last tile of 256 columns would have half of them: 540 and 548 TFLOP/s with 1408 columns, instead of 504."""

FEW_ROWS = 32
"""Rows of a group in the mean up to which they are few: with 64, K4096 N14336 G8, both take the same time."""

MATRIX_TILES = (
    TileSizes(256, 4, 2, 8),
    TileSizes(256, 4, 2, 16),
    TileSizes(256, 4, 2, 8, 1, 2),
    TileSizes(256, 4, 2, 8, 2, 1),
)
"""Tiles of the kernel of matrices. The same shape: 571 TFLOP/s with the first on an H200. Clusters bring nothing."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGrouped:
    """Returns the configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGrouped, ...]:
    """Returns the configurations worth measuring, the best first."""
    narrow = 0 < (columns(record) if direction == "forward" else record.lhs.shape[1]) % 256 <= 128
    row_tiles = (*NARROW, *ROW_TILES) if narrow else ROW_TILES
    if average_rows(record) <= FEW_ROWS:
        row_tiles = tuple(dict.fromkeys((HALVES, *row_tiles)))
    if direction == "forward":
        return tuple(HopperGrouped(**tile.fields) for tile in row_tiles)
    pairs = [(row_tiles[0], tile) for tile in MATRIX_TILES] + [(tile, MATRIX_TILES[0]) for tile in row_tiles[1:]]
    return tuple(_both(*pair) for pair in pairs)


def _both(of_lhs: TileSizes, of_rhs: TileSizes) -> HopperGroupedBackward:
    others = {f"rhs_{name}": value for name, value in of_rhs.fields.items() if name not in ROWS_ONLY}
    return HopperGroupedBackward(**of_lhs.fields, **others)


def _scaled_tile(n: int, stages: int, slots: int, *, by_columns: bool = False, dynamic: bool = False) -> HopperScaled:
    fields = {"block_n": n, "product_n": 128, "stages": stages, "slots": slots, "band": 16}
    return HopperScaled(**fields, by_columns=by_columns, dynamic=dynamic)


BY_COLUMNS = _scaled_tile(256, 3, 4, by_columns=True, dynamic=True)
"""A warpgroup for each half of the columns, and a counter of tiles.

On one H100, times bfloat16's speed, next to `BY_ROWS`: M65536 K2048 N1536 G128 1.61 and 1.45 with scales of 128 x 128,
1.23 and 1.12 with one a column in every block; M32768 K2048 N1408 G64 1.53 and 1.43, 1.28 and 1.17; M32768 K7168 N4096
G32 1.72 and 1.68, 1.22 and 1.16. With scales of rows and columns 1.73, 1.66 and 1.77; by rows 1.61, 1.58 and 1.80.
"""

BY_ROWS = _scaled_tile(256, 3, 4)

QUICK = (BY_ROWS, _scaled_tile(256, 4, 1), BY_COLUMNS)
"""Where tensor cores may sum over all contracted elements. The last does not leave it to them, and is 5% faster in the
first of these shapes and 5% slower in the last."""


def scaled_heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperScaled:
    """Returns the configuration of a call without a chosen or tuned one."""
    return scaled_candidates(record, device, direction)[0]


def scaled_candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperScaled, ...]:
    """Returns the configurations worth measuring, the best first."""
    return QUICK if quick(record) else (BY_COLUMNS, BY_ROWS)


def quick(record: GroupedMatmul) -> bool:
    """Whether tensor cores may sum over all contracted elements: scales do not change on the way, nor has the caller
    asked for more digits than they have."""
    assert record.lhs_scale is not None  # the kernel's requirements
    assert record.rhs_scale is not None
    one = record.lhs_scale.shape[1] == record.rhs_scale.shape[1] == 1
    return one and record.precision == lax.Precision.DEFAULT


def _gated_tile(n: int, stages: int, slots: int, band: int, *, alone: bool = False) -> HopperGated:
    return HopperGated(block_n=n, stages=stages, slots=slots, band=band, alone=alone)


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

GATED_ALONE = tuple(dataclasses.replace(tile, alone=True) for tile in GATED_TILES[:1])
"""Tiles where groups have few rows: 0.240 ms with 32 a group instead of 0.253, and 0.748 with 512 instead of 0.725."""

GATED_FEW_ROWS = 64
"""Rows of a group in the mean up to which they are few."""


def gated_heuristic(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGated:
    """Returns the configuration of a call without a chosen or tuned one."""
    return gated_candidates(record, device, direction)[0]


def gated_candidates(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGated, ...]:
    """Returns the configurations worth measuring, the best first."""
    few = average_rows(product_of(record)) <= GATED_FEW_ROWS
    return (*GATED_ALONE, *GATED_TILES) if few else (*GATED_TILES, *GATED_ALONE)


def product_of(record: GatedGroupedMatmul) -> GroupedMatmul:
    """Returns the product's record, with the shape of gathered rows, which no array holds."""
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    return product_record(record, jax.ShapeDtypeStruct((rows, record.lhs.shape[1]), record.lhs.dtype), record.lhs.dtype)
