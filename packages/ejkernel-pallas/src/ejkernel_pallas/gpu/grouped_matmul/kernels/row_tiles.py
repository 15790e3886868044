"""The tiles of the output of the kernels of rows: which a block takes, and where they are."""

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
        matrix: Number of its matrix.
        shared: Whether all blocks of a cluster, below one another, have that matrix.
        row: First row, of a whole group's tiles.
        begin: First row of the group.
        end: The row after the group's last.
        column: First column.
        half: Which half of the columns the block has; below zero for all of them.
    """

    matrix: Any
    shared: Any
    row: Any
    begin: Any
    end: Any
    column: Any
    half: Any = None

    def first(self, warpgroup: Any) -> Any:
        """Returns first row of a warpgroup's 64, which end with the group if they would not end before it."""
        return jnp.maximum(self.begin, jnp.minimum(self.row + warpgroup * WGMMA_M, self.end - WGMMA_M))


def cluster_tiles(spec: GroupedSpec, tiles: Any) -> Any:
    """Returns work items of so many tiles of rows: a cluster takes a tile for each member."""
    return lax.div(tiles + (spec.tile.cluster_m - 1), I32(spec.tile.cluster_m))


def split(call: Call, tiles: Any) -> Any:
    """How many tiles, the last ones, are two work items each.

    They would be a round in which at most half of the blocks have a tile: two blocks take half the time.
    """
    if not call.spec.splits:
        return I32(0)
    rest = lax.rem(tiles * call.spec.across, I32(call.blocks))
    return jnp.where(2 * rest <= call.blocks, rest, 0)


def single_rows(call: Call, tile: Tile) -> Any:
    """Whether only the first 64 rows of a tile are multiplied, by both warpgroups; None where that is never so."""
    spec = call.spec
    if not (spec.scaling and spec.scaling.by_columns):
        return None
    # A warpgroup has 64 rows of other tiles: of those that the output does not have all columns of, and of halves.
    few = tile.end - tile.row <= WGMMA_M
    if spec.splits:
        few &= tile.half < 0
    return few & (tile.column + spec.tile.block_n <= spec.columns) if spec.tail else few


class TileIndex(NamedTuple):
    """Where a tile of the output is: tile of rows, first column, and which half of the columns, below zero for both."""

    tile_row: Any
    column: Any
    half: Any


def tile_index(call: Call, count: Any, number: Any) -> TileIndex:
    """Returns where the tile that has a number is: bands of tiles of rows, in a band column after column."""
    spec = call.spec
    half: Any = I32(-1)
    if spec.splits:
        whole = count * spec.across - split(call, count)
        half = jnp.where(number < whole, -1, lax.rem(number - whole, I32(2)))
        number = jnp.where(number < whole, number, whole + lax.div(number - whole, I32(2)))
    per_band = spec.tile.band * spec.across
    # Blocks that run at the same time have the tiles of a band: few rows and few columns, which stay in L2.
    band, place = lax.div(number, I32(per_band)), lax.rem(number, I32(per_band))
    start = band * spec.tile.band
    height = jnp.minimum(cluster_tiles(spec, count) - start, spec.tile.band)
    tile_row, column = start + lax.rem(place, height), lax.div(place, height) * spec.tile.cluster_n + call.beside
    return TileIndex(tile_row, column * spec.tile.block_n, half)


def tile_of(call: Call, before: Any, count: Any, number: Any) -> Tile:
    """Returns the tile of the output that has a number."""
    place, members, table = tile_index(call, count, number), call.spec.tile.cluster_m, call.operands["tiles"]
    # Where the last member has no tile, it has the one before too: both store the same bits.
    entry, other = (
        before + jnp.minimum(place.tile_row * members + n, count - 1) for n in (call.below, members - 1 - call.below)
    )
    matrix, row, end, begin = (table[entry, n] for n in range(FIELDS))
    shared = table[other, 0] == matrix if members > 1 else jnp.bool_(False)
    return Tile(matrix, shared, row, begin, end, place.column, place.half)
