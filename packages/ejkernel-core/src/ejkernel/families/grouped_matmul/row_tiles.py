"""The tile list of a grouped matmul: which rows, of which group, each tile of rows has.

It is made on the device from group sizes that may be traced, and has a fixed length: m rows of e groups, and the rows
before and after them, have at most `m // block + e + 2` tiles of `block` rows that are not empty. So nothing is
recompiled when sizes change, and no row is copied or padded:

    groups      |   0   | 1 |      2         |  unassigned rows  |
    tiles of 4  |0000|00|1|2222|2222|22      |----|----|---       |     a tile begins with its group's first row

Unassigned rows have tiles unless the record leaves them undefined.

The list takes a few small kernels that compare and sum, one after the other; calls of few rows would feel more of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul.record import GroupedMatmul, group_row_bounds, running_sum

NO_GROUP = -1
"""The matrix index of tiles whose rows belong to no group with a matrix."""
VALUES_PER_TILE = 4
"""Fields of an entry: number of the matrix, or `NO_GROUP`; the tile's first row; the row after the last of its group;
and the first row of its group.

Entries that are not real are zeros. After the entries comes a line with how many have no matrix and come first, how
many have one and follow, and how many are real.
"""


class RowSegments(NamedTuple):
    """Unassigned rows, the groups of all matrices, and unassigned rows again: together all rows. int32 [E + 2].

    Attributes:
        first: First row.
        end: The row after the last.
        num_tiles: Number of tiles of the rows.
        cumulative_tiles: Number of tiles of these rows and all earlier rows.
    """

    first: jax.Array
    end: jax.Array
    num_tiles: jax.Array
    cumulative_tiles: jax.Array


def find_row_tiles(record: GroupedMatmul, block_rows: int) -> jax.Array:
    """Returns the tiles of a record in the order of rows, every row that is written in one of them: int32 [W + 1,
    `VALUES_PER_TILE`].

    Args:
        record: The record.
        block_rows: Rows of a tile.
    """
    matrices = record.rhs.shape[0]
    segments, length = _row_segments(record, block_rows), max_num_row_tiles(record.lhs.shape[0], matrices, block_rows)
    matrix = jnp.arange(-1, matrices + 1, dtype=jnp.int32)
    matrix = jnp.where(matrix < matrices, matrix, NO_GROUP)
    fields = (
        matrix,
        segments.first - (segments.cumulative_tiles - segments.num_tiles) * block_rows,
        segments.end,
        segments.first,
    )
    # A single masked sum gives the fields of the segment of every entry, and in the last line the numbers of tiles.
    entry = jnp.arange(length + 1, dtype=jnp.int32)[:, None]
    in_segment = (
        (entry < segments.cumulative_tiles)
        & (entry >= segments.cumulative_tiles - segments.num_tiles)
        & (entry < length)
    )
    counted = jnp.arange(matrices + 2)
    kinds = (counted == 0, (counted > 0) & (counted <= matrices), counted >= 0, counted < 0)
    values = jnp.where(in_segment[..., None], jnp.stack(fields, axis=-1), 0)
    values += jnp.where(entry[..., None] == length, segments.num_tiles[:, None] * jnp.stack(kinds, axis=-1), 0)
    steps = jnp.where(jnp.arange(VALUES_PER_TILE) == 1, block_rows, 0)
    real = jnp.any(in_segment, axis=1, keepdims=True)
    return jnp.sum(values, axis=1, dtype=jnp.int32) + jnp.where(real, entry * steps, 0)


def max_num_row_tiles(rows: int, matrices: int, block_rows: int) -> int:
    """Returns W, the largest number of tiles: the whole ones, one per group, and one for the unassigned rows."""
    return rows // block_rows + matrices + 2


def _row_segments(record: GroupedMatmul, block: int) -> RowSegments:
    rows = record.lhs.shape[0]
    begins, ends = group_row_bounds(record)
    first = jnp.concatenate((jnp.zeros((1,), jnp.int32), begins, ends[-1:]))
    end = jnp.concatenate((begins[:1], ends, jnp.full((1,), rows, jnp.int32)))
    tiles = cdiv(end - first, block)
    if record.left_over == "undefined":
        segment = jnp.arange(tiles.shape[0])
        tiles = jnp.where((segment > 0) & (segment <= record.rhs.shape[0]), tiles, 0)
    return RowSegments(first, end, tiles, running_sum(tiles))
