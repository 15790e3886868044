"""The tiles of the output of the kernels of rows: their assignment to blocks, and their position."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul.row_tiles import FIELDS
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import GroupedSpec
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of the output.

    Attributes:
        matrix: Index of its matrix.
        shared: Whether all blocks of a cluster along rows have that matrix.
        row: First row.
        begin: First row of the group.
        end: The row after the group's last.
        column: First column.
        half_index: Which half of the columns the block has; negative for all of them.
    """

    matrix: Any
    shared: Any
    row: Any
    begin: Any
    end: Any
    column: Any
    half_index: Any = None

    def first(self, warpgroup: Any) -> Any:
        """Returns the first row of a warpgroup's 64 rows, moved back to end with the group in the group's last tile."""
        return jnp.maximum(self.begin, jnp.minimum(self.row + warpgroup * WGMMA_M, self.end - WGMMA_M))


def num_cluster_items(spec: GroupedSpec, tiles: Any) -> Any:
    """Returns the work items of `tiles` tiles of rows: a cluster takes one tile per member."""
    return lax.div(tiles + (spec.tile.cluster_m - 1), I32(spec.tile.cluster_m))


def split(call: Call, tiles: Any) -> Any:
    """Returns how many of the last tiles are split into two work items each. Without the split, these tiles form a
    round in which at most half of the blocks have a tile; with the split, two blocks share a tile and the round takes
    half the time.
    """
    if not call.spec.splits:
        return I32(0)
    last_round_tiles = lax.rem(tiles * call.spec.column_tiles, I32(call.blocks))
    return jnp.where(2 * last_round_tiles <= call.blocks, last_round_tiles, 0)


def has_at_most_64_rows(call: Call, tile: Tile) -> Any:
    """Returns whether both warpgroups multiply only the first 64 rows of a tile; None if that is never the case."""
    spec = call.spec
    if not (spec.scaling and spec.scaling.split_by_columns):
        return None
    # In other tiles (partial ones along columns, and halves) each warpgroup has 64 rows.
    has_few_rows = tile.end - tile.row <= WGMMA_M
    if spec.splits:
        has_few_rows &= tile.half_index < 0
    return (
        has_few_rows & (tile.column + spec.tile.block_n <= spec.columns) if spec.partial_tile_columns else has_few_rows
    )


class TileIndex(NamedTuple):
    """The position of an output tile: its tile row, its first column, and its half of the columns. A negative half
    means all columns.
    """

    tile_row: Any
    column: Any
    half_index: Any


def tile_index(call: Call, count: Any, number: Any) -> TileIndex:
    """Returns the position of output tile `number`. Tiles are ordered by bands of tile rows, and column by column
    within a band.
    """
    spec = call.spec
    half_index: Any = I32(-1)
    if spec.splits:
        whole = count * spec.column_tiles - split(call, count)
        half_index = jnp.where(number < whole, -1, lax.rem(number - whole, I32(2)))
        number = jnp.where(number < whole, number, whole + lax.div(number - whole, I32(2)))
    tiles_per_group = spec.tile.group_m * spec.column_tiles
    # Blocks that run at the same time have the tiles of a band: few rows and few columns, which stay in L2.
    group_m, remainder = lax.div(number, I32(tiles_per_group)), lax.rem(number, I32(tiles_per_group))
    start = group_m * spec.tile.group_m
    band_rows = jnp.minimum(num_cluster_items(spec, count) - start, spec.tile.group_m)
    tile_row, column = (
        start + lax.rem(remainder, band_rows),
        lax.div(remainder, band_rows) * spec.tile.cluster_n + call.cluster_column,
    )
    return TileIndex(tile_row, column * spec.tile.block_n, half_index)


def load_tile(call: Call, before: Any, count: Any, number: Any) -> Tile:
    """Returns output tile `number`."""
    position, members, table = tile_index(call, count, number), call.spec.tile.cluster_m, call.operands["tiles"]
    # If the last member has no tile, it computes the previous one too: both store the same values.
    entry, other = (
        before + jnp.minimum(position.tile_row * members + n, count - 1)
        for n in (call.cluster_row, members - 1 - call.cluster_row)
    )
    matrix, row, end, begin = (table[entry, n] for n in range(FIELDS))
    shared = table[other, 0] == matrix if members > 1 else jnp.bool_(False)
    return Tile(matrix, shared, row, begin, end, position.column, position.half_index)
