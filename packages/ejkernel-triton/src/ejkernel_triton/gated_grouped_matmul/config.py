"""Tile sizes and launch parameters of the gated grouped matmul."""

import dataclasses
from typing import Any

from ejkernel.families.gated_grouped_matmul import FAMILY, GatedGroupedMatmul, as_grouped_matmul
from ejkernel.families.grouped_matmul import product_sum_dtype
from ejkernel.families.grouped_matmul.kinds import average_rows_per_group
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.grouped_matmul import config as grouped_config
from ejkernel_triton.grouped_matmul.config import GroupedForward, TileChoice
from ejkernel_triton.launch import ShapeDtype, is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedTiles:
    """Configuration of `gated_grouped_gemm_kernel`.

    Attributes:
        block_m: Rows per tile.
        block_n: Output columns per tile; the tile multiplies as many columns of the gate and of the values.
        block_k: Contracted elements per step.
        num_programs: Programs that share the tiles.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of operands.
    """

    block_m: int
    block_n: int
    block_k: int
    num_programs: int
    num_warps: int
    num_stages: int


PUBLIC_FIELDS = {name: name for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages")}
"""Maps fields of the public configuration to fields of this one."""

GROUP_M = 4
"""Tile rows per swizzle group (Triton's GROUP_M); on an H200 8 and 16 are 1 % and 2 % slower."""
LARGE_TILES = (TileChoice(128, 128, 64, 8, 3), TileChoice(128, 128, 64, 8, 4), TileChoice(128, 64, 64, 4, 3))
"""Tiles for groups of many rows, on Hopper and Blackwell; the best first."""
LARGE_TILES_WITHOUT_HOPPER_MMA = (TileChoice(128, 64, 32, 8, 4), TileChoice(64, 64, 32, 4, 4))
"""The same for other chips, whose tensor cores read operands from registers."""
SMALL_TILES = {
    64: (TileChoice(64, 64, 64, 4, 4), TileChoice(64, 128, 64, 8, 3)),
    32: (TileChoice(32, 64, 64, 4, 4), TileChoice(32, 64, 128, 4, 3)),
    16: (TileChoice(16, 64, 128, 4, 4), TileChoice(16, 64, 64, 4, 5)),
}
"""Tiles by their rows, for groups of few rows, where reading the matrices from HBM is the bottleneck."""
FLOAT32_TILES = (TileChoice(64, 32, 32, 4, 3), TileChoice(32, 32, 32, 4, 3))
"""Tiles for float32 operands."""


def heuristic(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> GatedTiles | GroupedForward:
    """Returns the default tiles for a record on a device."""
    return candidates(record, device, direction)[0]


def batch_invariant(
    record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction
) -> GatedTiles | GroupedForward:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    if grouped_config.sums_in_equal_steps(record.lhs.dtype, record.rhs.dtype, device):
        return heuristic(record, device, direction)
    rows = grouped_config.FIXED_ROWS_PER_GROUP * record.group_sizes.shape[0]
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"m": rows}), device, direction)


def candidates(
    record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction
) -> tuple[GatedTiles | GroupedForward, ...]:
    """Returns tiles worth measuring for a record on a device, the best first; backward, those of the product."""
    if direction == "backward":
        product = as_grouped_matmul(record, gathered_rows_shape(record), product_sum_dtype(record.lhs.dtype))
        return grouped_config.candidates(product, device, direction)
    if is_interpreting():
        return (_tile_config(TileChoice(32, 32, 32, 4, 1), gpu_of(device)),)
    chip, rows_per_group = (
        gpu_of(device),
        average_rows_per_group(as_grouped_matmul(record, gathered_rows_shape(record), record.lhs.dtype)),
    )
    tile_rows = next((rows for rows in (16, 32, 64) if rows_per_group <= rows + rows // 2), 128)
    if record.lhs.dtype.itemsize > 2:
        tiles = FLOAT32_TILES
    elif tile_rows < 128:
        tiles = SMALL_TILES[tile_rows]
    else:
        tiles = LARGE_TILES if chip.architecture in ("hopper", "blackwell") else LARGE_TILES_WITHOUT_HOPPER_MMA
    return tuple(dict.fromkeys(_tile_config(_reduce_stages(tile, record, chip), chip) for tile in tiles))


def gathered_rows_shape(record: GatedGroupedMatmul) -> Any:
    """Returns shape and dtype of the gathered rows, which are never in memory."""
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    return ShapeDtype((rows, record.lhs.shape[1]), record.lhs.dtype)


def _stage_bytes(tile: TileChoice, itemsize: int) -> int:
    return (tile.m + 2 * tile.n) * tile.k * itemsize


def _reduce_stages(tile: TileChoice, record: GatedGroupedMatmul, chip: Gpu) -> TileChoice:
    """Returns a tile with at most as many stages as the chip's shared memory holds; AMD's chips have two."""
    stages = min(tile.stages, 2) if chip.vendor == "amd" else tile.stages
    while stages > 1 and stages * _stage_bytes(tile, record.lhs.dtype.itemsize) > chip.shared_memory - 2 * KIBI:
        stages -= 1
    return tile._replace(stages=stages)


def _tile_config(tile: TileChoice, chip: Gpu) -> GatedTiles:
    # Programs per multiprocessor, limited by shared memory and to 16 warps.
    programs_in_shared_memory = chip.shared_memory // (tile.stages * _stage_bytes(tile, 2))
    programs_per_sm = max(1, min(programs_in_shared_memory, 16 // tile.warps))
    return GatedTiles(
        block_m=tile.m,
        block_n=tile.n,
        block_k=tile.k,
        num_programs=3 if is_interpreting() else programs_per_sm * chip.multiprocessors,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
