"""Tile sizes and launch parameters of the grouped-matmul kernels."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel.planning.grouped_kinds import average_rows
from ejkernel_triton.chips import KIBI, Chip, chip_of
from ejkernel_triton.grouped_matmul.spec import blocks_of_scales, operand_of, step_of_bytes, widened
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedForward:
    """Configuration of the kernel whose programs own rows of the output.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Contracted elements a step.
        band: Tiles of rows that are gone down before the next column.
        flatten: Whether the loops over tiles and over steps become one, so that a tile's first copies are under way
            while the last one is stored.
        num_programs: Programs that share the tiles.
        num_warps: Warps a program.
        num_stages: Pipeline stages: steps whose operands are copied ahead.
    """

    block_m: int
    block_n: int
    block_k: int
    band: int
    flatten: bool
    num_programs: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedBackward(GroupedForward):
    """Configuration of the backward pass: the fields of the forward kernel, of the gradient of lhs, and those of rhs's.

    Attributes:
        rhs_block_m: Rows of a tile of a matrix's gradient.
        rhs_block_n: Columns of it.
        rhs_block_k: Rows of lhs and of the cotangent a step.
        rhs_num_warps: Warps a program of that kernel.
        rhs_num_stages: Pipeline stages of it.
    """

    rhs_block_m: int
    rhs_block_n: int
    rhs_block_k: int
    rhs_num_warps: int
    rhs_num_stages: int


FACES = {
    "block_m": "block_m",
    "block_n": "block_n",
    "block_k": "block_k",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Fields of the public configuration and what they set here."""


class Tile(NamedTuple):
    """Tile, step, warps and stages of a kernel."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    flatten: bool = False


BAND = 8
"""Tiles of rows that are gone down before the next column: their rows stay in the second-level cache."""

LARGE = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(256, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3, True),
)
"""Of 16-bit operands where groups have many rows, on chips with Hopper's matrix unit; the best first.

On an H200, M65536 K2048 N1536 G128: 577, 556, 511, 424 and 382 TFLOP/s (`benchmarks/grouped_matmul_gpu.py`).
"""
TRANSPOSED = (Tile(128, 256, 64, 8, 3, True), *LARGE[:-1])
"""Likewise of the gradient of lhs, where flat loops are faster: both gradients at 500 TFLOP/s instead of 452."""
BESIDE = (Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3))
"""Where the epilogue adds something, for which larger tiles and flat loops have no registers."""
OF_MATRICES = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(256, 128, 64, 8, 3),
)
"""Of the kernel that owns matrices."""
OF_BYTES = (
    Tile(128, 128, 128, 8, 4),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(64, 128, 128, 4, 4),
)
"""Of rows and matrices of 8 bits, with float32 sums of every step, for which larger tiles have no registers."""
BYTES_IN_BLOCKS = (Tile(64, 128, 128, 8, 4), Tile(128, 64, 128, 8, 4))
"""With scales of every step, where the matrix unit has other layouts than Hopper's."""
QUICK_BYTES = (
    Tile(128, 256, 128, 8, 3),
    Tile(128, 256, 128, 8, 4),
    Tile(128, 128, 128, 4, 3),
    Tile(256, 128, 128, 8, 4),
    Tile(128, 256, 64, 8, 5),
)
"""Likewise, with sums left to the matrix unit."""
SMALL = {
    64: (Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 8, 4), Tile(64, 128, 64, 4, 4, True)),
    32: (Tile(32, 128, 128, 4, 4), Tile(32, 128, 64, 4, 5), Tile(32, 64, 128, 4, 4)),
    16: (Tile(16, 128, 128, 4, 4), Tile(16, 128, 64, 4, 5), Tile(16, 64, 128, 4, 5)),
}
"""By rows of a tile, where groups have few: then reading the matrices takes the time."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> GroupedForward:
    """Tile sizes for a record on a device."""
    return candidates(record, device, direction)[0]


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[GroupedForward, ...]:
    """Tile sizes worth measuring for a record on a device, the best first."""
    chip = chip_of(device)
    step = step_of_bytes(record) if direction == "forward" else 0
    tiles = _byte_tiles(record, step, chip) if step else _row_tiles(widened(record), chip, direction)
    if interpreting():
        tiles = (Tile(32, 32, 32, 4, 1),)
    found = [_forward(tile, chip) for tile in tiles]
    if direction == "forward":
        return tuple(found)
    others = (Tile(64, 32, 32, 4, 1),) if interpreting() else _matrix_tiles(widened(record), chip)
    pairs = [(found[0], tile) for tile in others] + [(own, others[0]) for own in found[1:]]
    return tuple(_backward(own, tile) for own, tile in pairs)


def _row_tiles(record: GroupedMatmul, chip: Chip, direction: Direction) -> tuple[Tile, ...]:
    """Tiles of the kernel that owns rows."""
    adds = record.existing_out is not None or record.rhs_bias is not None
    adds = direction == "forward" and (adds or (_is_wide_output(record) and chip.architecture != "hopper"))
    height = _height(record)
    if _wide(record, direction):
        tiles = tuple(Tile(min(height, 64), n, 32, _warps(record), s) for n, s in ((64, 3), (128, 3)))
    elif height < 128:
        tiles = SMALL[height]
    elif record.rhs.dtype.itemsize == 1 or record.rhs_scale is not None:
        # Converted in registers on their way to the matrix unit.
        tiles = (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4))
    elif chip.architecture not in ("hopper", "blackwell"):
        tiles = (Tile(128, 128, 32, 8 if adds else 4, 4), Tile(128, 128, 64, 8, 3))
    else:
        tiles = TRANSPOSED if direction == "backward" else BESIDE if adds else LARGE
    shrunk = tuple(_shrunk(tile, chip) for tile in tiles)
    return tuple(tile for tile in shrunk if tile.stages > 2) or shrunk


def _byte_tiles(record: GroupedMatmul, step: int, chip: Chip) -> tuple[Tile, ...]:
    """Tiles of the forward kernel where rows and matrices of 8 bits meet as they are."""
    height = _height(record)
    if height < 128:
        tiles = tuple(tile._replace(k=128) for tile in SMALL[height])
    else:
        tiles = QUICK_BYTES if record.precision == lax.Precision.DEFAULT else OF_BYTES
        if max(blocks_of_scales(record)) > 1:
            tiles = OF_BYTES if chip.architecture == "hopper" else BYTES_IN_BLOCKS
    return tuple(dict.fromkeys(_shrunk(tile._replace(k=min(tile.k, step)), chip, 1) for tile in tiles))


def _height(record: GroupedMatmul) -> int:
    """Rows of a tile."""
    few = average_rows(record)
    return next((rows for rows in (16, 32, 64) if few <= rows + rows // 2), 128)


def _wide(record: GroupedMatmul, direction: Direction) -> bool:
    """Whether operands are multiplied in float32."""
    others = () if record.rhs_scale is None else (jnp.float32,)
    others += (record.out_dtype,) if direction == "backward" else ()  # the dtype of the cotangent
    return operand_of(record, *others).itemsize > 2


def _is_wide_output(record: GroupedMatmul) -> bool:
    return jnp.dtype(record.out_dtype).itemsize > 2


def _warps(record: GroupedMatmul) -> int:
    """Of float32 tiles: products without tensor cores keep operands in registers, too."""
    return 8 if record.precision == lax.Precision.HIGHEST else 4


def _matrix_tiles(record: GroupedMatmul, chip: Chip) -> tuple[Tile, ...]:
    """Tiles of the kernel that owns matrices."""
    if _wide(record, "backward"):
        tiles = (Tile(64, 64, 32, _warps(record), 3), Tile(64, 128, 32, 8, 3))
    elif chip.architecture not in ("hopper", "blackwell"):
        tiles = (Tile(128, 128, 32, 8, 4), Tile(128, 64, 32, 4, 4))
    else:
        tiles = OF_MATRICES
    return tuple(_shrunk(tile, chip) for tile in tiles)


def _shrunk(tile: Tile, chip: Chip, size: int = 2) -> Tile:
    """A tile with as few stages as the chip's shared memory holds, at `size` bytes an element; AMD's have two."""
    stages = min(tile.stages, 2) if chip.vendor == "amd" else tile.stages
    # Operands that are converted on their way take one more tile of columns.
    while stages > 1 and (stages * (tile.m + tile.n) + tile.n) * tile.k * size > chip.shared_memory - 2 * KIBI:
        stages -= 1
    return tile._replace(stages=stages)


def _forward(tile: Tile, chip: Chip) -> GroupedForward:
    bytes_of_stages = tile.stages * (tile.m + tile.n) * tile.k * 2
    resident = max(1, min(chip.shared_memory // max(1, bytes_of_stages), 16 // tile.warps))
    return GroupedForward(
        block_m=tile.m,
        block_n=tile.n,
        block_k=tile.k,
        band=BAND,
        flatten=tile.flatten,
        # The interpreter runs programs one after the other: a few, so that tiles are shared there too.
        num_programs=3 if interpreting() else resident * chip.multiprocessors,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _backward(own: GroupedForward, tile: Tile) -> GroupedBackward:
    return GroupedBackward(
        **dataclasses.asdict(own),
        rhs_block_m=tile.m,
        rhs_block_n=tile.n,
        rhs_block_k=tile.k,
        rhs_num_warps=tile.warps,
        rhs_num_stages=tile.stages,
    )
