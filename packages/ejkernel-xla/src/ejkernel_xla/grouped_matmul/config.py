"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

BLOCK_SIZES = (128, 256, 512)
MIN_BLOCK = 16
"""Rows of a group's last tile, which computes padding rows too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
    """The configuration of either pass.

    Attributes:
        block_m: Rows of a group's largest tiles.
        batch_invariant: Whether all tiles have `block_m` rows, whatever the sizes of groups.
    """

    block_m: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_m": "block_m"}
"""Public configuration field -> field of this."""


def sizes(record: GroupedMatmul, config: RowTiles) -> tuple[int, ...]:
    """Returns rows of the tiles of a group, from the largest, by quarters: what one size leaves over is left to the
    next.
    """
    tile_rows = [config.block_m]
    if config.batch_invariant:
        return (config.block_m,)
    while tile_rows[-1] // 4 >= MIN_BLOCK:
        tile_rows.append(tile_rows[-1] // 4)
    rows = record.lhs.shape[0]
    return tuple(dict.fromkeys(at_most(size, rows) for size in tile_rows))


def heuristic(record: GroupedMatmul, device: Any, direction: Direction) -> RowTiles:
    """Returns the tiles for a record on a device, not measured."""
    return RowTiles(block_m=BLOCK_SIZES[1])


FIXED_BLOCK = 16
"""Rows of all tiles in a `batch_invariant` block: a product of another size may add in another order."""


def batch_invariant(record: GroupedMatmul, device: Any, direction: Direction) -> RowTiles:
    """Returns the tiles of all calls in a `batch_invariant` block."""
    return RowTiles(block_m=FIXED_BLOCK, batch_invariant=True)


def candidates(record: GroupedMatmul, device: Any, direction: Direction) -> tuple[RowTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    return tuple(RowTiles(block_m=rows) for rows in BLOCK_SIZES)
