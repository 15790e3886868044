"""The tile list of a grouped matmul: which rows, of which group, each tile of rows has.

It is made on the device from group sizes that may be traced, and has a fixed length: m rows of e groups, and the rows
before and after them, have at most `m // block + e + 2` tiles of `block` rows that are not empty. So nothing is
recompiled when sizes change, and no row is copied or padded:

    groups      |   0   | 1 |      2         |  rows of no group  |
    tiles of 4  |0000|00|1|2222|2222|22      |----|----|---       |     a tile begins with its group's first row
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.grouped_matmul import GroupedMatmul, group_rows

NONE = -1
"""In place of a matrix: the rows are of no group that has one."""


class RowTiles(NamedTuple):
    """Tiles of rows in the order of rows; together they have every row of lhs once. All int32.

    Attributes:
        before: [], how many entries come before those with a matrix.
        count: [], how many have one.
        total: [], how many are real.
        matrix: [W], number of the tile's matrix, or `NONE`.
        row: [W], its first row.
        end: [W], the row after the last of its group.
        begin: [W], the first row of its group.
    """

    before: jax.Array
    count: jax.Array
    total: jax.Array
    matrix: jax.Array
    row: jax.Array
    end: jax.Array
    begin: jax.Array


def find_row_tiles(record: GroupedMatmul, block: int) -> RowTiles:
    """The tiles of a record.

    Args:
        record: The record.
        block: Rows of a tile.
    """
    rows, matrices = record.lhs.shape[0], record.rhs.shape[0]
    first, end = group_rows(record)
    # The rows before the first matrix's group and those after the last one's are groups of no matrix.
    begins = jnp.concatenate((jnp.zeros((1,), jnp.int32), first, end[-1:]))
    ends = jnp.concatenate((first[:1], end, jnp.full((1,), rows, jnp.int32)))
    tiles = -(-(ends - begins) // block)
    stops = running_sum(tiles)
    entry = jnp.arange(rows // block + matrices + 2, dtype=jnp.int32)
    # Comparing with all groups is one small kernel; a binary search would be a loop of several.
    group = jnp.minimum(jnp.sum(stops <= entry[:, None], axis=1, dtype=jnp.int32), matrices + 1)
    row = begins[group] + (entry - stops[group] + tiles[group]) * block
    matrix = jnp.where((group > 0) & (group <= matrices), group - 1, NONE)
    return RowTiles(stops[0], stops[-2] - stops[0], stops[-1], matrix, row, ends[group], begins[group])


def running_sum(x: jax.Array) -> jax.Array:
    """Sums of the first elements up to each, of a short vector: one small kernel."""
    place = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(place[:, None] >= place, x, 0), axis=1, dtype=x.dtype)
