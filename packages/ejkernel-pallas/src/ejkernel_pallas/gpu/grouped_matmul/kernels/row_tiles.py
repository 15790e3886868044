"""The tiles of the output of the kernels of rows: their assignment to blocks, and their position."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul.row_tiles import VALUES_PER_TILE
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import GroupedSpec
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


@dataclasses.dataclass(frozen=True)
class OutputTile:
    """One tile of the output.

    Attributes:
        matrix_index: Index of its matrix.
        cluster_shares_matrix: Whether all blocks of a cluster along rows have that matrix.
        first_row: First row.
        group_begin: First row of the group.
        group_end: The row after the group's last.
        first_column: First column.
        column_half: Which half of the columns the block has; negative for all of them.
    """

    matrix_index: Any
    cluster_shares_matrix: Any
    first_row: Any
    group_begin: Any
    group_end: Any
    first_column: Any
    column_half: Any = None

    def first_row_of_warpgroup(self, warpgroup: Any) -> Any:
        """Returns the first row of a warpgroup's 64 rows, moved back to end with the group in the group's last tile."""
        return jnp.maximum(
            self.group_begin, jnp.minimum(self.first_row + warpgroup * WGMMA_M, self.group_end - WGMMA_M)
        )


def num_cluster_tile_rows(spec: GroupedSpec, num_tile_rows: Any) -> Any:
    """Returns the work items of `num_tile_rows` tiles of rows: a cluster takes one tile per member."""
    return lax.div(num_tile_rows + (spec.tile.cluster_m - 1), I32(spec.tile.cluster_m))


def num_split_tiles(call: Call, num_tile_rows: Any) -> Any:
    """Returns how many of the last tiles are split into two work items each. Without the split, these tiles form a
    round in which at most half of the blocks have a tile; with the split, two blocks share a tile and the round takes
    half the time.
    """
    if not call.spec.may_split_last_tiles:
        return I32(0)
    last_round_tiles = lax.rem(num_tile_rows * call.spec.num_column_tiles, I32(call.num_blocks))
    return jnp.where(2 * last_round_tiles <= call.num_blocks, last_round_tiles, 0)


def has_at_most_64_rows(call: Call, tile: OutputTile) -> Any:
    """Returns whether both warpgroups multiply only the first 64 rows of a tile; None if that is never the case."""
    spec = call.spec
    if not (spec.scale_constants and spec.scale_constants.split_by_columns):
        return None
    # In other tiles (partial ones along columns, and halves) each warpgroup has 64 rows.
    has_few_rows = tile.group_end - tile.first_row <= WGMMA_M
    if spec.may_split_last_tiles:
        has_few_rows &= tile.column_half < 0
    return (
        has_few_rows & (tile.first_column + spec.tile.block_n <= spec.num_columns)
        if spec.partial_tile_columns
        else has_few_rows
    )


class TilePosition(NamedTuple):
    """The position of an output tile: its tile row, its first column, and its half of the columns. A negative half
    means all columns.
    """

    tile_row: Any
    first_column: Any
    column_half: Any


def find_tile_position(call: Call, num_tile_rows: Any, tile_index: Any) -> TilePosition:
    """Returns the position of output tile `tile_index`. Tiles are ordered by bands of tile rows, and column by column
    within a band.
    """
    spec = call.spec
    half_index: Any = I32(-1)
    if spec.may_split_last_tiles:
        whole = num_tile_rows * spec.num_column_tiles - num_split_tiles(call, num_tile_rows)
        half_index = jnp.where(tile_index < whole, -1, lax.rem(tile_index - whole, I32(2)))
        tile_index = jnp.where(tile_index < whole, tile_index, whole + lax.div(tile_index - whole, I32(2)))
    tiles_per_group = spec.tile.group_m * spec.num_column_tiles
    # Blocks that run at the same time have the tiles of a band: few rows and few columns, which stay in L2.
    group_m, remainder = lax.div(tile_index, I32(tiles_per_group)), lax.rem(tile_index, I32(tiles_per_group))
    start = group_m * spec.tile.group_m
    band_rows = jnp.minimum(num_cluster_tile_rows(spec, num_tile_rows) - start, spec.tile.group_m)
    tile_row, column = (
        start + lax.rem(remainder, band_rows),
        lax.div(remainder, band_rows) * spec.tile.cluster_n + call.cluster_column,
    )
    return TilePosition(tile_row, column * spec.tile.block_n, half_index)


def load_output_tile(call: Call, first_group_tile_row: Any, num_tile_rows: Any, tile_index: Any) -> OutputTile:
    """Returns output tile `tile_index`."""
    position, members, table = (
        find_tile_position(call, num_tile_rows, tile_index),
        call.spec.tile.cluster_m,
        call.operands["tiles"],
    )
    # If the last member has no tile, it computes the previous one too: both store the same values.
    entry, other = (
        first_group_tile_row + jnp.minimum(position.tile_row * members + n, num_tile_rows - 1)
        for n in (call.cluster_row, members - 1 - call.cluster_row)
    )
    matrix, row, end, begin = (table[entry, n] for n in range(VALUES_PER_TILE))
    shared = table[other, 0] == matrix if members > 1 else jnp.bool_(False)
    return OutputTile(matrix, shared, row, begin, end, position.first_column, position.column_half)
