"""The work list: the order of tiles of rows and groups, as tables that index maps and kernels read.

The rows of a matrix span some tiles, of which the first and the last may have rows of other matrices too: such a tile
is computed once for each. The number of items depends on the group sizes, which are traced, and is a bound of the grid;
the table has the length of the longest list.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul import GroupedMatmul, group_row_bounds

HAS_WORK_FLAG, WHOLE_TILE_FLAG, FIRST_ITEM_FLAG, LAST_ITEM_FLAG, BEFORE_ALL_GROUPS_FLAG = 1, 2, 4, 8, 16
"""Flags of an item, in order: some rows of the tile belong to the item's matrix; all of them do; the item is the first
that adds to its output tile; it is the last one; the tile has only rows before the first group.
"""
NUM_FLAGS = 5
"""The number of flags."""


class WorkList(NamedTuple):
    """A list of work items.

    Attributes:
        num_items: int32 scalar, the number of items.
        table: int32 [6 * max items], read by `WorkItem`.
    """

    num_items: jax.Array
    table: jax.Array


class WorkItem(NamedTuple):
    """One entry of a table, int32 scalars.

    Attributes:
        matrix_index: Index of the matrix.
        row_tile: Index of the tile of rows that is written.
        loaded_row_tile: Index of the tile of rows that is read; for an item without work that of a neighbouring item,
            so that nothing is copied.
        first_row: The first row of the tile that belongs to the matrix.
        end_row: The row after the last one of the tile that belongs to the matrix.
        flags: Sum of the constants above.
    """

    matrix_index: Any
    row_tile: Any
    loaded_row_tile: Any
    first_row: Any
    end_row: Any
    flags: Any

    def has(self, flag: int) -> Any:
        """Returns whether it has a flag."""
        return (self.flags & flag) != 0

    @property
    def opaque_zero(self) -> Any:
        """Returns an opaque zero, which the compiler cannot fold: the bits above the flags."""
        return lax.shift_right_logical(self.flags, np.int32(NUM_FLAGS))


def read_item(table: Any, step: Any) -> WorkItem:
    """Returns an entry of a table."""
    most = table.shape[0] // len(WorkItem._fields)
    return WorkItem(*(table[step + field * most] for field in range(len(WorkItem._fields))))


def make_coordinate_map(item_axis: int) -> Callable[..., tuple[Any, ...]]:
    """Returns a function from grid indices, one of which is an item, and the table to the work item and the other
    indices.
    """

    def item_coordinates(*grid_indices_and_table: Any) -> tuple[Any, ...]:
        *indices, table = grid_indices_and_table
        return read_item(table, indices.pop(item_axis)), *indices

    return item_coordinates


def work_list_by_row_tiles(record: GroupedMatmul, size: int) -> WorkList:
    """Returns work items for a kernel that accumulates for tiles of rows: every tile at least once, its items
    consecutive.
    """
    first, end = group_row_bounds(record)
    rows = record.lhs.shape[0]
    tiles, nonempty = cdiv(rows, size), end > first
    start, counts = first // size, jnp.where(nonempty, (end - 1) // size + 1 - first // size, 0)
    # Unassigned rows are before the first matrix's and after the last one's: tiles that have no others.
    before = first[0] // size
    after = jnp.where(nonempty.any(), cdiv(end[-1], size), before)
    counts = jnp.concatenate([before[None], counts, (tiles - after)[None]])
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), start, after[None]])
    # Neighbouring groups share at most one tile, which bounds the list and the grid.
    matrix, tile, count = _list_owner_tiles(start, counts, tiles + first.shape[0] - 1)
    work = (matrix > 0) & (matrix <= first.shape[0])
    # An item without work refers to the blocks of the nearest one that has work.
    index = jnp.arange(first.shape[0], dtype=jnp.int32)
    first_nonempty = jnp.min(jnp.where(nonempty, index, first.shape[0] - 1))
    most = jnp.max(jnp.where(nonempty, index, 0))
    is_leading = matrix == 0
    matrix = jnp.where(work, matrix - 1, jnp.where(is_leading, first_nonempty, most))
    source = jnp.where(work, tile, jnp.where(is_leading, before, jnp.maximum(after - 1, 0)))
    flags = work * HAS_WORK_FLAG + is_leading * BEFORE_ALL_GROUPS_FLAG + _differs_from_previous(tile) * FIRST_ITEM_FLAG
    return _pack_work_list(WorkItem(matrix, tile, jnp.minimum(source, tiles - 1), first, end, flags), count, size)


def work_list_by_matrices(record: GroupedMatmul, size: int) -> WorkList:
    """Returns the work items of a kernel that accumulates for tiles of matrices: every matrix at least once."""
    first, end = group_row_bounds(record)
    tiles, nonempty = cdiv(record.lhs.shape[0], size), end > first
    counts = jnp.where(nonempty, (end - 1) // size + 1 - first // size, 1)
    start = jnp.minimum(first // size, tiles - 1)
    matrix, tile, count = _list_owner_tiles(start, counts, tiles + first.shape[0])
    flags = jnp.take(nonempty, matrix) * HAS_WORK_FLAG + _differs_from_previous(matrix) * FIRST_ITEM_FLAG
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    flags = flags + (jnp.arange(matrix.shape[0], dtype=jnp.int32) == jnp.take(ends, matrix) - 1) * LAST_ITEM_FLAG
    return _pack_work_list(WorkItem(matrix, tile, tile, first, end, flags), count, size)


def _list_owner_tiles(
    first_tiles: jax.Array, tiles_per_owner: jax.Array, max_items: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists owners, each `tiles_per_owner` times, with consecutive tiles from its first; also returns the length of the
    list.
    """
    ends = jnp.cumsum(tiles_per_owner, dtype=jnp.int32)
    step = jnp.arange(max_items, dtype=jnp.int32)
    owner = jnp.sum(step[:, None] >= ends, axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, tiles_per_owner.shape[0] - 1)
    return owner, jnp.take(first_tiles, owner) + step - jnp.take(ends - tiles_per_owner, owner), ends[-1]


def _differs_from_previous(x: jax.Array) -> jax.Array:
    """Returns where a list's value differs from the previous one."""
    return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])


def _pack_work_list(work_items: WorkItem, num_items: jax.Array, size: int) -> WorkList:
    """Returns the table of work items, whose rows are still relative to the matrices."""
    # Relative to the tile: kernels compare them with the indices of its rows.
    low = jnp.clip(jnp.take(work_items.first_row, work_items.matrix_index) - work_items.row_tile * size, 0, size)
    high = jnp.clip(jnp.take(work_items.end_row, work_items.matrix_index) - work_items.row_tile * size, 0, size)
    whole = (low == 0) & (high == size) & (work_items.flags & HAS_WORK_FLAG != 0)
    table = work_items._replace(first_row=low, end_row=high, flags=work_items.flags + whole * WHOLE_TILE_FLAG)
    return WorkList(num_items, jnp.stack([x.astype(jnp.int32) for x in table]).reshape(-1))
