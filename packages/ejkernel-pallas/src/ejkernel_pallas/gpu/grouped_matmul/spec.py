"""Constants, tiles and shared memory of the grouped-matmul kernels on Hopper."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.kinds import average_rows
from ejkernel.families.grouped_matmul.row_tiles import most_tiles
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction, given_values
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY, SWIZZLE_COLUMNS, WGMMA_M

STEP = 64
"""Contracted elements a step of 16 bits: a swizzled row of 128 bytes."""
WARPGROUPS = 2
"""Warpgroups that multiply."""
REGISTERS, FETCHING_REGISTERS = 240, 24
"""Of a thread that multiplies, and of one that fetches. A multiprocessor has 65536."""
GATHERING = (232, 40)
"""The same where rows are gathered: a thread that fetches keeps where eight lines lie."""
COPIED_BLOCKS = 4
"""Blocks of contracted elements whose scales of a row are copied together: 16 bytes, the least of a bulk copy."""
LEAD = 2
"""Products of a tile that run while the tile before is written."""
RESERVE = 2 * 1024
"""Bytes of shared memory for barriers and what Mosaic keeps there."""
LINE = 128
"""Bytes of a swizzled row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGrouped:
    """Configuration of the kernel that multiplies rows with matrices (rows.py).

    Attributes:
        block_n: Columns of a tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        slots: Parts of a warpgroup's output, of 64 rows, that are in shared memory on their way out.
        band: Tiles of rows, or of all rows of a cluster, that are gone down before the next column.
        cluster_m: Blocks of a cluster below one another, 1 or 2: they read the part of a matrix that both have once.
        cluster_n: Blocks of a cluster side by side, 1 or 2: they read the rows that both have once.
        overlap: Whether a tile of 16 bits is written while the first products of the next one run, for which it stays
            in registers.
        halves: Whether tiles of at most 64 rows are multiplied by halves of their columns, one a warpgroup.
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
        rhs_cluster_n: Blocks of a cluster side by side.
    """

    rhs_block_n: int
    rhs_stages: int
    rhs_slots: int
    rhs_band: int
    rhs_cluster_m: int
    rhs_cluster_n: int

    @property
    def of_rhs(self) -> HopperGrouped:
        """The configuration of the kernel that owns matrices."""
        names = [field.name for field in dataclasses.fields(HopperGrouped) if field.name not in OF_ROWS_ALONE]
        return HopperGrouped(**{name: getattr(self, f"rhs_{name}") for name in names}, overlap=False, halves=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperScaled:
    """Configuration of rows.py for operands of 8 bits with scales (scaled.py).

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
class Scaling:
    """Constants of rows.py with operands of 8 bits and scales.

    Attributes:
        lhs_blocks: Blocks of contracted elements in which a row has a scale each.
        rhs_blocks: Likewise of a column.
        product_n: Columns of a product.
        quick: Whether tensor cores sum over all steps.
        by_columns: Whether a warpgroup has all rows of a tile, and a product's columns.
        dynamic: Whether a counter gives blocks the number of their next tile.
    """

    lhs_blocks: int
    rhs_blocks: int
    product_n: int
    quick: bool
    by_columns: bool
    dynamic: bool

    @property
    def copies_rows(self) -> bool:
        """Whether scales of rows come by bulk copies: a warpgroup with all rows of a tile has many, and no registers
        for where they lie."""
        return self.by_columns and self.lhs_blocks > 1 and self.lhs_blocks % COPIED_BLOCKS == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Constants of rows.py where the first half of a matrix's columns gates the second.

    Attributes:
        activation: Of the gate: "silu" or "gelu".
        gathers: Whether rows are gathered by an index each.
        alone: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    activation: str
    gathers: bool
    alone: bool


OF_ROWS_ALONE = ("overlap", "halves")
"""Fields that the kernel that owns matrices does not have."""
FACES = {"block_n": "block_n", "num_stages": "stages"}
"""Public configuration field -> field of these."""

BLOCK_M = WARPGROUPS * WGMMA_M
"""Rows of a tile: 64 for each warpgroup that multiplies."""


class Tile(NamedTuple):
    """Columns of a tile, stages, slots, band, and blocks of a cluster below one another and side by side."""

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
        """By the names of a configuration."""
        names = ("block_n", "stages", "slots", "band", "cluster_m", "cluster_n", "overlap", "halves")
        return dict(zip(names, self, strict=True))


HALVES = Tile(256, 4, 2, 16, halves=True)
"""Where groups have few rows: each warpgroup has half of a matrix's columns, and no tile has rows for the other alone.

On an H100, of the bandwidth that XLA reads with: K2048 N1536 G128 with 64, 128, 256 and 512 rows 0.83, 0.84, 0.90 and
0.90, the first of `OF_ROWS` 0.76, 0.77, 0.82 and 0.83; K4096 N14336 G8 with 64 rows 0.91 and 0.88.
"""
OF_ROWS = (
    Tile(256, 4, 2, 16),
    Tile(256, 4, 2, 8),
    Tile(256, 4, 2, 16, overlap=True),
    Tile(256, 4, 2, 8, overlap=True),
    HALVES,
    Tile(256, 4, 2, 4, 2, 1),
)
"""Tiles of rows.py. The first has passed the whole suite on a chip; the others' values were compared there.

On an H200, M65536 K2048 N1536 G128, forward: 540, 554, 575, 569, 558 and 547 TFLOP/s.
"""
NARROW = (Tile(128, 5, 4, 8), Tile(128, 5, 4, 8, overlap=True))
"""Where the last tile of 256 columns would have half of them: 540 and 548 TFLOP/s with 1408 columns, instead of 504."""
FEW_ROWS = 32
"""Rows of a group in the mean up to which they are few: with 64, K4096 N14336 G8, both take the same time."""
OF_MATRICES = (
    Tile(256, 4, 2, 8),
    Tile(256, 4, 2, 16),
    Tile(256, 4, 2, 8, 1, 2),
    Tile(256, 4, 2, 8, 2, 1),
)
"""Tiles of matrices.py. The same shape: 571 TFLOP/s with the first on an H200. Clusters bring nothing."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGrouped:
    """The configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGrouped, ...]:
    """The configurations worth measuring, the best first."""
    narrow = 0 < (columns(record) if direction == "forward" else record.lhs.shape[1]) % 256 <= 128
    of_rows = (*NARROW, *OF_ROWS) if narrow else OF_ROWS
    if average_rows(record) <= FEW_ROWS:
        of_rows = tuple(dict.fromkeys((HALVES, *of_rows)))
    if direction == "forward":
        return tuple(HopperGrouped(**tile.fields) for tile in of_rows)
    pairs = [(of_rows[0], tile) for tile in OF_MATRICES] + [(tile, OF_MATRICES[0]) for tile in of_rows[1:]]
    return tuple(_both(*pair) for pair in pairs)


def _both(of_lhs: Tile, of_rhs: Tile) -> HopperGroupedBackward:
    others = {f"rhs_{name}": value for name, value in of_rhs.fields.items() if name not in OF_ROWS_ALONE}
    return HopperGroupedBackward(**of_lhs.fields, **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Constants of a kernel.

    Attributes:
        rows: M.
        contracted: Contracted elements in rows.py; rows of the result in matrices.py.
        columns: Columns of the result.
        matrices: E.
        transposed: Whether matrices lie with the columns of the result first.
        dtype: Of the operands.
        out: Of the result.
        tile: The configuration.
        scaling: Of operands of 8 bits; None for those of 16.
        gate: Of the gated product; None for the product itself.
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
        """Whether rows are gathered."""
        return self.gate is not None and self.gate.gathers

    @property
    def dynamic(self) -> bool:
        """Whether a counter gives blocks the number of their next tile; else they take every `blocks`-th."""
        return self.scaling is not None and self.scaling.dynamic

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies, and of one that fetches."""
        return GATHERING if self.gathers else (REGISTERS, FETCHING_REGISTERS)

    @property
    def panels(self) -> int:
        """Panels of 64 columns in a stage of a gated matrix."""
        return 2 * self.tile.block_n // SWIZZLE_COLUMNS

    @property
    def step(self) -> int:
        """Contracted elements a step in rows.py: a swizzled row."""
        return LINE // jnp.dtype(self.dtype).itemsize

    @property
    def part(self) -> int:
        """Columns of a result that leave together: a swizzled row."""
        return LINE // jnp.dtype(self.out).itemsize

    @property
    def members(self) -> int:
        """Blocks of a cluster."""
        return self.tile.cluster_m * self.tile.cluster_n

    @property
    def across(self) -> int:
        """Tiles of columns, of all members of a cluster."""
        return -(-self.columns // (self.tile.block_n * self.tile.cluster_n))

    @property
    def down(self) -> int:
        """Tiles of rows of a matrix, of all members of a cluster, for the kernel that owns matrices."""
        return -(-self.contracted // (BLOCK_M * self.tile.cluster_m))

    @property
    def overlapped(self) -> bool:
        """Whether tiles are written while the first products of the next one run."""
        return self.tile.overlap and self.out.itemsize == 2

    @property
    def splits(self) -> bool:
        """Whether the last tiles may be divided among two blocks each, by columns."""
        product = self.scaling.product_n if self.scaling and not self.scaling.quick else SWIZZLE_COLUMNS
        whole = self.tile.block_n % (2 * product) == 0
        return whole and not (self.tile.overlap or self.tile.halves or self.tail or self.members > 1)

    @property
    def even(self) -> bool:
        """Whether the output has all columns of all tiles."""
        return self.columns == self.across * self.tile.block_n * self.tile.cluster_n

    @property
    def tail(self) -> int:
        """Columns of a last tile that the output does not have all columns of, or 0."""
        return self.columns % self.tile.block_n

    @property
    def steps(self) -> int:
        """Steps of a tile in rows.py."""
        return self.contracted // self.step

    @property
    def entries(self) -> int:
        """Entries of the tile list."""
        return most_tiles(self.rows, self.matrices, BLOCK_M)


def make_spec(record: GroupedMatmul, params: HopperGrouped, out: Any) -> GroupedSpec:
    """The constants of the forward kernel.

    Raises:
        ValueError: A tile size is none that a kernel can have.
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
    """Shared memory of a kernel, without barriers."""
    # Operands have 16 bits; a slot has a swizzled row of 128 bytes for each of 64 rows, whatever the output's dtype.
    stage = (BLOCK_M + params.block_n) * STEP * 2
    return params.stages * stage + WARPGROUPS * params.slots * WGMMA_M * LINE


def reasons(record: GroupedMatmul) -> list[str]:
    """What `Requires` has no word for."""
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
        found.append(f"preferred_element_type {record.out_dtype} is not of 16 or 32 bits")
    return found
