"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most, known_or
from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel.ops.device import current_device
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

BLOCK_SIZES = (16, 32, 64, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTiles:
    """The configuration of the forward pass for pools of any length; pools of one fixed length use no tiles.

    Attributes:
        block_size: Tokens per tile. The pools that contain a whole tile share its sum.
        batch_invariant: Whether each pool is summed alone, from its first token on.
    """

    block_size: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_size": "block_size"}
"""Public configuration field -> field of this."""

ASSUMED_TOKENS = 1024
"""Tokens of a row for which tiles are planned if their count is symbolic."""


def block_size(record: SegmentPooling, config: TokenTiles) -> int:
    """Returns tokens of a tile, no more than there are."""
    return at_most(config.block_size, record.values.shape[1])


def rows_per_step(size: int) -> int:
    """Returns rows that one step of a loop adds: a step costs a CPU next to nothing and others a launch."""
    return 1 if current_device().platform == "cpu" else size


def heuristic(record: SegmentPooling, device: Any, direction: Direction) -> TokenTiles:
    """Returns the tile for a record on a device, not measured.

    A pool of n tokens adds about n / size tiles and size tokens at its ends: fewest rows for the root of n, which a CPU
    adds one by one.
    """
    if device.platform != "cpu":
        return TokenTiles(block_size=_typical_length(record))
    return TokenTiles(block_size=min(32, 1 << _mean_length(record).bit_length() // 2))


def batch_invariant(record: SegmentPooling, device: Any, direction: Direction) -> TokenTiles:
    """Returns the tile of all calls in a `batch_invariant` block, which do without."""
    return TokenTiles(block_size=1, batch_invariant=True)


def candidates(record: SegmentPooling, device: Any, direction: Direction) -> tuple[TokenTiles, ...]:
    """Returns the tiles worth measuring for a record; only the forward pass of pools of any length has tiles."""
    if record.ranges is None or direction == "backward":
        return ()
    return tuple(TokenTiles(block_size=size) for size in BLOCK_SIZES)


def _typical_length(record: SegmentPooling) -> int:
    """Returns about the length of a pool, so that short pools are not padded to several times their length."""
    return min(256, max(8, 1 << _mean_length(record).bit_length()))


def _mean_length(record: SegmentPooling) -> int:
    """Returns tokens a pool, on average."""
    return known_or(record.values.shape[1], ASSUMED_TOKENS) // (1 if record.ranges is None else record.ranges.shape[0])
