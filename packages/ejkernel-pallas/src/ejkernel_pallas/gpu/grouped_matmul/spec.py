"""Constants, tiles and shared memory of the grouped-matmul kernels on Hopper."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.device import DeviceInfo
from ejkernel.planning.row_tiles import most_tiles
from ejkernel_pallas.gpu.hopper.sizes import PART, ROWS, SHARED_MEMORY

STEP = 64
"""Contracted elements a step: a swizzled row of 128 bytes."""
WARPGROUPS = 2
"""Warpgroups that multiply."""
REGISTERS, FETCHING_REGISTERS = 240, 24
"""Of a thread that multiplies, and of one that fetches. A multiprocessor has 65536."""
SLOTS = 2
"""Places in shared memory through which a warpgroup's output leaves, in turns."""
RESERVE = 2 * 1024
"""Bytes of shared memory for barriers and what Mosaic keeps there."""
LINE = 128
"""Bytes of a swizzled row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGrouped:
    """The configuration of the kernels; the backward pass has one for both of its kernels.

    Attributes:
        block_n: Columns of a tile.
        stages: Pipeline stages: steps whose operands are in shared memory.
        band: Tiles of rows that are gone down before the next column.
    """

    block_n: int
    stages: int
    band: int


FACES = {"block_n": "block_n", "num_stages": "stages"}
"""Public configuration field -> field of these."""

BLOCK_M = WARPGROUPS * ROWS
"""Rows of a tile: 64 for each warpgroup that multiplies."""

CANDIDATES = tuple(
    HopperGrouped(block_n=n, stages=stages, band=band) for n, stages, band in ((256, 4, 8), (256, 4, 16), (128, 5, 8))
)
"""The best first."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGrouped:
    """The configuration when nobody chose one."""
    return CANDIDATES[0]


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGrouped, ...]:
    """The configurations worth measuring."""
    return CANDIDATES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Constants of a kernel.

    Attributes:
        rows: M.
        contracted: Contracted elements of the kernel that owns rows; rows of the result of the one that owns matrices.
        columns: Columns of the result.
        matrices: E.
        transposed: Whether matrices lie with the columns of the result first.
        dtype: Of the operands.
        out: Of the result.
        tile: The configuration.
    """

    rows: int
    contracted: int
    columns: int
    matrices: int
    transposed: bool
    dtype: Any
    out: Any
    tile: HopperGrouped

    @property
    def part(self) -> int:
        """Columns of a result that leave together: a swizzled row."""
        return LINE // jnp.dtype(self.out).itemsize

    @property
    def across(self) -> int:
        """Tiles of columns."""
        return -(-self.columns // self.tile.block_n)

    @property
    def down(self) -> int:
        """Tiles of rows of a matrix, for the kernel that owns those."""
        return -(-self.contracted // BLOCK_M)

    @property
    def steps(self) -> int:
        """Steps of a tile, for the kernel that owns rows."""
        return self.contracted // STEP

    @property
    def entries(self) -> int:
        """Entries of the tile list."""
        return most_tiles(self.rows, self.matrices, BLOCK_M)


def make_spec(record: GroupedMatmul, params: HopperGrouped, out: Any) -> Spec:
    """The constants of the forward kernel.

    Raises:
        ValueError: A tile size is none that a kernel can have.
    """
    if params.block_n not in (64, 128, 192, 256):
        raise ValueError(f"cfg: got block_n={params.block_n}, the Mosaic GPU kernels want 64, 128, 192 or 256")
    if params.stages < 2 or params.band < 1:
        raise ValueError(f"cfg: got {given_values(params)}, wants at least 2 stages and a band of 1")
    if shared_bytes(params) > SHARED_MEMORY - RESERVE:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return Spec(
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
    stage = (BLOCK_M + params.block_n) * STEP * 2
    return params.stages * stage + WARPGROUPS * SLOTS * ROWS * LINE


def reasons(record: GroupedMatmul) -> list[str]:
    """What `Requires` has no word for."""
    rows, contracted = record.lhs.shape
    found = []
    if rows % 8 or rows < ROWS:
        found.append(f"{rows} rows are not a multiple of 8, or fewer than {ROWS}")
    for name, size in (("contracted elements", contracted), ("columns", columns(record))):
        if size % PART or not size:
            found.append(f"{size} {name} are not a multiple of {PART}")
    if record.rhs.dtype != record.lhs.dtype:
        found.append(f"rhs has dtype {record.rhs.dtype}, lhs has {record.lhs.dtype}")
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        found.append(f"preferred_element_type {record.out_dtype} is not of 16 or 32 bits")
    return found
