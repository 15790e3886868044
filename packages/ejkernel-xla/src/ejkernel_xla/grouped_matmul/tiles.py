"""Tile sizes: which are used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.modules.operations.configs import GroupedMatmulConfig
from ejkernel.ops.config.params import Direction

ROWS = (128, 256, 512)
SMALLEST = 16
"""Rows of the last tile of a group, which computes the rows it does not have too."""


def sizes(record: GroupedMatmul, config: GroupedMatmulConfig) -> tuple[int, ...]:
    """Rows of the tiles of a group, from the largest, by quarters: what one size leaves over is left to the next."""
    size = config.block_m or ROWS[1]
    found = [size]
    while found[-1] // 4 >= SMALLEST:
        found.append(found[-1] // 4)
    rows = record.lhs.shape[0]
    return tuple(dict.fromkeys(min(size, rows) for size in found))


def heuristic(record: GroupedMatmul, device: Any, direction: Direction) -> GroupedMatmulConfig:
    """The tiles for a record on a device, not measured."""
    return GroupedMatmulConfig(block_m=ROWS[1])


def candidates(record: GroupedMatmul, device: Any, direction: Direction) -> tuple[GroupedMatmulConfig, ...]:
    """Tiles worth measuring for a record on a device."""
    return tuple(GroupedMatmulConfig(block_m=rows) for rows in ROWS)
