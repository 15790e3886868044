"""Records in tiles of fixed sizes, in which calls in a `batch_invariant` block compute their rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ejkernel.ops import ConfigSpace
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_tiles import TILE_ROWS, map_tiles_of_axes
from ejkernel.types.arguments import array_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The configuration of a kernel with nothing else to choose.

    Attributes:
        batch_invariant: Whether rows are computed in tiles of `TILE_ROWS`.
    """

    batch_invariant: bool = False


def _heuristic(record: Any, device: Any, direction: Direction) -> RowOrder:
    return RowOrder()


def _candidates(record: Any, device: Any, direction: Direction) -> tuple[RowOrder, ...]:
    return ()


def _batch_invariant(record: Any, device: Any, direction: Direction) -> RowOrder:
    return RowOrder(batch_invariant=True)


ROW_ORDER = ConfigSpace(
    heuristic=_heuristic,
    candidates=_candidates,
    forward=RowOrder,
    batch_invariant=_batch_invariant,
    fixed_if_invariant=("batch_invariant",),
)
"""The configurations of such a kernel."""


def forward_in_tiles(
    forward: Callable[[Any], Any],
    record: Any,
    axes: Mapping[str, Any],
    letter: str,
    *,
    block: int = TILE_ROWS,
    out_axes: Any = 0,
) -> Any:
    """Returns the results of a forward pass, computed for tiles of `block` entries along an axis of the record.

    Args:
        forward: Record of a tile -> tree of arrays.
        record: The record. Arrays of size 1 along the axis broadcast.
        axes: Axis letters of its arrays, as `Family.axes_of` returns them.
        letter: The letter of the axis.
        block: Entries of a tile.
        out_axes: The axis of the results, as the first levels of their tree.
    """
    letters = {name: axes[name].split() for name in array_fields(record)}
    at = {name: each.index(letter) for name, each in letters.items() if letter in each}
    size = max(getattr(record, name).shape[axis] for name, axis in at.items())
    arrays = {name: getattr(record, name) for name in at if getattr(record, name).shape[at[name]] == size}
    return map_tiles_of_axes(lambda tile: forward(dataclasses.replace(record, **tile)), arrays, at, out_axes, block)


def symbolic_sizes_limit(record: Any) -> tuple[str, ...]:
    """Returns why a record with symbolic sizes is refused; empty if it has none."""
    sizes = (size for x in array_fields(record).values() for size in x.shape)
    return () if all(isinstance(size, int) for size in sizes) else ("symbolic sizes cannot be cut into fixed tiles",)
