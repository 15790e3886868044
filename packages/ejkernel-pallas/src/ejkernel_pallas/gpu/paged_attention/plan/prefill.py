"""The work tiles of prefill: the query rows and keys of each one, and their order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS

QUERY_ROWS_PER_TILE = 128
"""Query rows per work tile."""
PAGED_TILE_COLUMNS = slice(4, 11)
"""Columns of the table of tiles with the fields of `PagedTile`."""
NUM_LIVE_TILES_COLUMN = 11
"""The column with the number of tiles that have rows."""


class QueryRowRuns(NamedTuple):
    """Contiguous query rows: those of each sequence, those before the first and those after the last one.

    Padding rows have no keys, so that the kernel writes zeros there.

    Attributes:
        first_rows: [N + 2] int32, the first row.
        num_rows: [N + 2] int32; 0 if the kernel should not write them.
        num_keys: [N + 2] int32, tokens of the sequence.
        first_key: [N + 2] int32, the first key.
        has_missing_pages: [N + 2] bool, whether pages of the sequence are absent.
    """

    first_rows: jax.Array
    num_rows: jax.Array
    num_keys: jax.Array
    first_key: jax.Array
    has_missing_pages: jax.Array


class QueryRowTiles(NamedTuple):
    """Tiles of query rows, each with rows of one run: a sequence's rows, or padding rows. All int32.

    Attributes:
        num_live_tiles: [W], in each tile the number of tiles that have rows, which come first.
        run_index: [W].
        first_row: [W], the tile's first row, a multiple of eight.
        run_start: [W], the first of the tile's rows that belongs to its run.
        run_end: [W], the row after the last one of its run.
    """

    num_live_tiles: jax.Array
    run_index: jax.Array
    first_row: jax.Array
    run_start: jax.Array
    run_end: jax.Array


def make_prefill_tiles(record: PagedAttention, sequence_row_limits: paged_cache.QueryRowLimits) -> jax.Array:
    """Returns the work tiles of the sequences with many query rows, and of padding rows.

    Returns:
        [1, W, 12] int32, tiles in the order in which blocks process them: their ranges of key blocks, as
        `tile_scheduler.block_bounds` reads them, the fields of `PagedTile`, and the number of tiles with rows over all
        heads.
    """
    runs = _make_row_runs(record, sequence_row_limits)
    count, sequences = record.query.shape[0], record.kv_lens.shape[0]
    # An upper bound on such sequences; a run that starts at any row has up to seven rows of another one.
    max_runs = min(sequences, count // max(1, sequence_row_limits.min_rows)) + 2
    tiles = _make_row_tiles(runs, (count + (SWIZZLE_ATOM_ROWS - 1) * max_runs) // QUERY_ROWS_PER_TILE + max_runs)
    position = (runs.num_keys - runs.num_rows - runs.first_rows)[tiles.run_index] + tiles.first_row
    low, keys, blocks = _key_bounds_and_block_ranges(record, runs, tiles, position)
    items = (
        jnp.minimum(tiles.run_index, sequences - 1),
        position,
        low,
        keys,
        tiles.first_row,
        tiles.run_start,
        tiles.run_end,
    )
    # A single array, since XLA would compute each by a separate launch before the kernel.
    return jnp.stack((*blocks, *items, tiles.num_live_tiles * record.query.shape[1]), axis=1)[None]


def _make_row_runs(record: PagedAttention, sequence_row_limits: paged_cache.QueryRowLimits) -> QueryRowRuns:
    starts, rows = paged_cache.query_ranges(record)
    count, empty_run = record.query.shape[0], jnp.zeros(2, I32)
    begin = jnp.min(jnp.where(rows > 0, starts, count))
    end = jnp.maximum(jnp.max(jnp.where(rows > 0, starts + rows, 0)), begin)
    rows = jnp.where((rows >= sequence_row_limits.min_rows) & (rows <= sequence_row_limits.max_rows), rows, 0)
    low = jnp.zeros_like(rows) if record.kv_starts is None else record.kv_starts.astype(I32)
    return QueryRowRuns(
        first_rows=jnp.concatenate((starts, jnp.stack((jnp.zeros_like(end), end)))),
        num_rows=jnp.concatenate((rows, jnp.stack((begin, count - end)))),
        num_keys=jnp.concatenate((jnp.where(rows > 0, record.kv_lens.astype(I32), 0), empty_run)),
        first_key=jnp.concatenate((low, empty_run)),
        has_missing_pages=jnp.concatenate((_has_missing_pages_before_end(record), empty_run > 0)),
    )


def _make_row_tiles(runs: QueryRowRuns, max_tiles: int) -> QueryRowTiles:
    """Returns the tiles of runs, ordered by the run's keys, the most first, and in a run the last tile first.

    Blocks that run together then read keys of the same sequence at about the same time, from L2; and no block is left
    with a long tile at the end.
    """
    number = jnp.arange(runs.num_keys.shape[0], dtype=I32)
    # Copies start at multiples of eight rows.
    before = runs.first_rows % SWIZZLE_ATOM_ROWS
    count = jnp.where(runs.num_rows > 0, cdiv(before + runs.num_rows, QUERY_ROWS_PER_TILE), 0)
    # Sums of comparisons: a sort, a running sum and a search are at least one launch each.
    keys, other = runs.num_keys[:, None], runs.num_keys[None]
    is_ordered_before = (other > keys) | ((other == keys) & (number[None] < number[:, None]))
    begin = jnp.sum(jnp.where(is_ordered_before, count[None], 0), axis=1)
    total = jnp.sum(jnp.broadcast_to(count[None], is_ordered_before.shape), axis=1)
    tile = jnp.arange(max_tiles, dtype=I32)
    contains_tile = (begin[None] <= tile[:, None]) & (tile[:, None] < (begin + count)[None])
    run, is_live_tile = jnp.sum(jnp.where(contains_tile, number[None], 0), axis=1), tile < total[0]
    row = (runs.first_rows - before)[run] + jnp.where(
        is_live_tile, (begin + count)[run] - 1 - tile, 0
    ) * QUERY_ROWS_PER_TILE
    first = jnp.maximum(runs.first_rows[run] - row, 0)
    end = jnp.where(is_live_tile, jnp.minimum((runs.first_rows + runs.num_rows)[run] - row, QUERY_ROWS_PER_TILE), 0)
    return QueryRowTiles(jnp.broadcast_to(total[0], tile.shape), run, row, first, end)


def _key_bounds_and_block_ranges(
    record: PagedAttention, runs: QueryRowRuns, tiles: QueryRowTiles, position: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Returns the first key of each tile, the end of its keys, and the four limits of its ranges of blocks."""
    left, right = causal_window_bounds(record)
    # Positions of the first row of the run, and after the last one.
    first_position, last_position = position + tiles.run_start, position + tiles.run_end
    keys, start = (
        jnp.minimum(runs.num_keys, paged_cache.max_sequence_len(record))[tiles.run_index],
        runs.first_key[tiles.run_index],
    )
    if right is not None:
        keys = jnp.minimum(keys, last_position + right)
    low = jnp.maximum(start if left is None else jnp.maximum(start, first_position - left), 0)
    keys = jnp.where((tiles.run_end > tiles.run_start) & (keys > low), keys, 0)
    low = jnp.where(keys > 0, low, 0)
    first, end_block = low // KEYS_PER_STEP, jnp.maximum(cdiv(keys, KEYS_PER_STEP), low // KEYS_PER_STEP + 1)
    # Full blocks: all rows attend to all keys from the last row's left limit to the first row's right limit.
    begin = start if left is None else jnp.maximum(start, last_position - 1 - left)
    end = keys if right is None else jnp.minimum(keys, first_position + right + 1)
    full_end = jnp.clip(end // KEYS_PER_STEP, first, end_block)
    # At most up to the end of full blocks: the kernel masks blocks before `full_start` only at their lower end.
    full_start = jnp.clip(cdiv(begin, KEYS_PER_STEP), first, full_end)
    # An absent page masks its keys, which full blocks do not.
    has_missing_pages = runs.has_missing_pages[tiles.run_index]
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
