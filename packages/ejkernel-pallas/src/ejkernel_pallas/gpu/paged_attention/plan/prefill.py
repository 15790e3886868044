"""The work tiles of prefill: the query rows and keys of each one, and their order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS

ROWS_PER_TILE = 128
"""Query rows per work tile."""
KEY_RANGE_FIELDS = slice(4, 11)
"""Columns of the table of tiles with the fields of `PagedTile`."""
NUM_LIVE_TILES_FIELD = 11
"""The column with the number of tiles that have rows."""


class RowRuns(NamedTuple):
    """Contiguous query rows: those of each sequence, those before the first and those after the last one.

    Padding rows have no keys, so that the kernel writes zeros there.

    Attributes:
        starts: [N + 2] int32, the first row.
        rows: [N + 2] int32; 0 if the kernel should not write them.
        keys: [N + 2] int32, tokens of the sequence.
        low: [N + 2] int32, the first key.
        has_missing_pages: [N + 2] bool, whether pages of the sequence are absent.
    """

    starts: jax.Array
    rows: jax.Array
    keys: jax.Array
    low: jax.Array
    has_missing_pages: jax.Array


class RowTiles(NamedTuple):
    """Tiles of query rows, each of one run. All int32.

    Attributes:
        total: [W], in each tile the number of tiles that have rows, which come first.
        run: [W].
        row: [W], the tile's first row, a multiple of eight.
        first: [W], the first of the tile's rows that belongs to its run.
        end: [W], the row after the last one of its run.
    """

    total: jax.Array
    run: jax.Array
    row: jax.Array
    first: jax.Array
    end: jax.Array


def make_prefill(record: PagedAttention, lengths: paged_cache.RowLimits) -> jax.Array:
    """Returns the work tiles of the sequences with many query rows, and of padding rows.

    Returns:
        [1, W, 12] int32, tiles in the order in which blocks process them: their ranges of key blocks, as
        `tile_scheduler.block_range` reads them, the fields of `PagedTile`, and the number of tiles with rows over all
        heads.
    """
    runs = _runs(record, lengths)
    count, sequences = record.query.shape[0], record.kv_lens.shape[0]
    # An upper bound on such sequences; a run that starts at any row has up to seven rows of another one.
    max_runs = min(sequences, count // max(1, lengths.least)) + 2
    tiles = _tiles(runs, (count + (SWIZZLE_ATOM_ROWS - 1) * max_runs) // ROWS_PER_TILE + max_runs)
    position = (runs.keys - runs.rows - runs.starts)[tiles.run] + tiles.row
    low, keys, blocks = _key_blocks(record, runs, tiles, position)
    items = (jnp.minimum(tiles.run, sequences - 1), position, low, keys, tiles.row, tiles.first, tiles.end)
    # A single array, since XLA would compute each by a separate launch before the kernel.
    return jnp.stack((*blocks, *items, tiles.total * record.query.shape[1]), axis=1)[None]


def _runs(record: PagedAttention, lengths: paged_cache.RowLimits) -> RowRuns:
    starts, rows = paged_cache.query_ranges(record)
    count, empty_run = record.query.shape[0], jnp.zeros(2, I32)
    begin = jnp.min(jnp.where(rows > 0, starts, count))
    end = jnp.maximum(jnp.max(jnp.where(rows > 0, starts + rows, 0)), begin)
    rows = jnp.where((rows >= lengths.least) & (rows <= lengths.most), rows, 0)
    low = jnp.zeros_like(rows) if record.kv_starts is None else record.kv_starts.astype(I32)
    return RowRuns(
        starts=jnp.concatenate((starts, jnp.stack((jnp.zeros_like(end), end)))),
        rows=jnp.concatenate((rows, jnp.stack((begin, count - end)))),
        keys=jnp.concatenate((jnp.where(rows > 0, record.kv_lens.astype(I32), 0), empty_run)),
        low=jnp.concatenate((low, empty_run)),
        has_missing_pages=jnp.concatenate((_has_missing_pages_before_end(record), empty_run > 0)),
    )


def _tiles(runs: RowRuns, max_tiles: int) -> RowTiles:
    """Returns the tiles of runs, ordered by the run's keys, the most first, and in a run the last tile first.

    Blocks that run together then read keys of the same sequence at about the same time, from L2; and no block is left
    with a long tile at the end.
    """
    number = jnp.arange(runs.keys.shape[0], dtype=I32)
    # Copies start at multiples of eight rows.
    before = runs.starts % SWIZZLE_ATOM_ROWS
    count = jnp.where(runs.rows > 0, cdiv(before + runs.rows, ROWS_PER_TILE), 0)
    # Sums of comparisons: a sort, a running sum and a search are at least one launch each.
    keys, other = runs.keys[:, None], runs.keys[None]
    is_ordered_before = (other > keys) | ((other == keys) & (number[None] < number[:, None]))
    begin = jnp.sum(jnp.where(is_ordered_before, count[None], 0), axis=1)
    total = jnp.sum(jnp.broadcast_to(count[None], is_ordered_before.shape), axis=1)
    tile = jnp.arange(max_tiles, dtype=I32)
    contains_tile = (begin[None] <= tile[:, None]) & (tile[:, None] < (begin + count)[None])
    run, count_live_tiles = jnp.sum(jnp.where(contains_tile, number[None], 0), axis=1), tile < total[0]
    row = (runs.starts - before)[run] + jnp.where(count_live_tiles, (begin + count)[run] - 1 - tile, 0) * ROWS_PER_TILE
    first = jnp.maximum(runs.starts[run] - row, 0)
    end = jnp.where(count_live_tiles, jnp.minimum((runs.starts + runs.rows)[run] - row, ROWS_PER_TILE), 0)
    return RowTiles(jnp.broadcast_to(total[0], tile.shape), run, row, first, end)


def _key_blocks(
    record: PagedAttention, runs: RowRuns, tiles: RowTiles, position: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Returns the first key of each tile, the end of its keys, and the four limits of its ranges of blocks."""
    left, right = band(record)
    # Positions of the first row of the run, and after the last one.
    first_position, last_position = position + tiles.first, position + tiles.end
    keys, start = jnp.minimum(runs.keys, paged_cache.capacity(record))[tiles.run], runs.low[tiles.run]
    if right is not None:
        keys = jnp.minimum(keys, last_position + right)
    low = jnp.maximum(start if left is None else jnp.maximum(start, first_position - left), 0)
    keys = jnp.where((tiles.end > tiles.first) & (keys > low), keys, 0)
    low = jnp.where(keys > 0, low, 0)
    first, end_block = low // KEYS_PER_STEP, jnp.maximum(cdiv(keys, KEYS_PER_STEP), low // KEYS_PER_STEP + 1)
    # Full blocks: all rows attend to all keys from the last row's left limit to the first row's right limit.
    begin = start if left is None else jnp.maximum(start, last_position - 1 - left)
    end = keys if right is None else jnp.minimum(keys, first_position + right + 1)
    full_end = jnp.clip(end // KEYS_PER_STEP, first, end_block)
    # At most up to the end of full blocks: the kernel masks blocks before `full_start` only at their lower end.
    full_start = jnp.clip(cdiv(begin, KEYS_PER_STEP), first, full_end)
    # An absent page masks its keys, which full blocks do not.
    has_missing_pages = runs.has_missing_pages[tiles.run]
    full_start, full_end = (
        jnp.where(has_missing_pages, first, full_start),
        jnp.where(has_missing_pages, first, full_end),
    )
    return low, keys, (first, full_start, full_end, end_block)


def _has_missing_pages_before_end(record: PagedAttention) -> jax.Array:
    """Returns whether pages of a sequence's keys are absent, bool [N]."""
    if record.block_tables is None:
        return jnp.zeros(record.kv_lens.shape, bool)
    pages, slots = record.block_tables, paged_cache.page_size(record)
    is_used = jnp.arange(pages.shape[1], dtype=I32) * slots < record.kv_lens.astype(I32)[:, None]
    return jnp.any(is_used & ((pages < 0) | (pages >= paged_cache.page_count(record))), axis=1)
