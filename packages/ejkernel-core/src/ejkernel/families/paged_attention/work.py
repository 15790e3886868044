"""The work list of paged attention: one entry for every tile of query rows of one sequence.

It is made on the device from lengths that may be traced, and has a fixed size: q rows of n sequences have at most
`q // block + n` tiles of `block` rows that are not empty. `distribute_key_tiles` gives the key tiles of all entries to
programs in equal shares, so that one long sequence among short ones does not set the time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.record import PagedAttention, causal_window_bounds


class WorkList(NamedTuple):
    """Tiles of query rows, the real ones first. All int32.

    Attributes:
        num_live: [], how many entries are real.
        sequence: [W].
        row: [W], the tile's first row of the record's queries.
        rows: [W], how many rows it has; 0 for entries that are not real.
        position: [W], of its first row.
        context_length: [W], tokens of the sequence before its queries.
        low: [W], the first key any of its rows attends.
        high: [W], one more than the last.
    """

    num_live: jax.Array
    sequence: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    context_length: jax.Array
    low: jax.Array
    high: jax.Array


def make_work_list(record: PagedAttention, rows_per_tile: int, count_multiple: int = 1) -> WorkList:
    """Returns the tiles of a record, in the order of sequences.

    Args:
        record: The record.
        rows_per_tile: Most query rows of a tile.
        count_multiple: W is a multiple of it.
    """
    starts, _ = paged_cache.query_ranges(record)
    _, _, sequence, skipped, rows, position = paged_cache.query_tiles(record, rows_per_tile, count_multiple)
    low, high = _key_ranges_of_tiles(record, sequence, position, rows)
    live = jnp.sum(rows > 0, dtype=jnp.int32)
    return WorkList(live, sequence, starts[sequence] + skipped, rows, position, position - skipped, low, high)


def longest_first(work: WorkList) -> WorkList:
    """Returns the entries with most keys first, so that entries worked on together end together."""
    # Entries that are not real come last, after tiles without keys, whose rows still have an output.
    order = jnp.argsort(jnp.where(work.rows > 0, work.low - work.high, 1), stable=True)
    return WorkList(work.num_live, *(x[order] for x in work[1:]))


class KeyTileRanges(NamedTuple):
    """The key tiles that each program processes. All arrays are int32.

    The key tiles of all entries and KV heads form one line: entry by entry, in an entry head by head. Program p
    processes the key tiles from `begin[p]` to `begin[p] + share`; the line ends at `total`.

    Attributes:
        start: [W], where an entry's tiles begin in the line.
        tiles_per_head: [W], key tiles of one head of an entry; at least 1 where the entry is real, 0 elsewhere.
        entry: [P], the entry in which a program begins.
        begin: [P].
        tiles_per_program: [], tiles per program.
        total: [].
    """

    start: jax.Array
    tiles_per_head: jax.Array
    entry: jax.Array
    begin: jax.Array
    tiles_per_program: jax.Array
    total: jax.Array


def distribute_key_tiles(work: WorkList, block_kv: int, kv_heads: int, programs: int) -> KeyTileRanges:
    """Deals the key tiles of a work list to programs, in shares that differ by none but the last.

    Args:
        work: The list. Key tiles begin at multiples of `block_kv`.
        block_kv: Keys per tile.
        kv_heads: KV heads, whose tiles are apart.
        programs: P.
    """
    spanned = cdiv(work.high, block_kv) - work.low // block_kv
    # A tile without keys still has rows to write.
    tiles = jnp.where(work.rows > 0, jnp.maximum(jnp.where(work.high > work.low, spanned, 0), 1), 0)
    ends = jnp.cumsum(tiles * kv_heads, dtype=jnp.int32)
    total = ends[-1]
    share = jnp.maximum(cdiv(total, programs), 1)
    begin = jnp.minimum(jnp.arange(programs, dtype=jnp.int32) * share, total)
    entry = jnp.sum(ends <= begin[:, None], axis=1, dtype=jnp.int32)
    return KeyTileRanges(ends - tiles * kv_heads, tiles, jnp.minimum(entry, ends.shape[0] - 1), begin, share, total)


def take_batch(work: WorkList, batch: jax.Array, entries_per_batch: int) -> WorkList:
    """Returns the entries of one batch, `entries_per_batch` of them."""
    parts = (jax.lax.dynamic_slice(x, (batch * entries_per_batch,), (entries_per_batch,)) for x in work[1:])
    return WorkList(work.num_live, *parts)


def _key_ranges_of_tiles(
    record: PagedAttention, sequence: jax.Array, position: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns first key and one more than the last key of tiles of `rows` rows from `position` on."""
    left, right = causal_window_bounds(record)
    low = jnp.zeros_like(position) if record.kv_starts is None else record.kv_starts.astype(jnp.int32)[sequence]
    high = jnp.minimum(record.kv_lens.astype(jnp.int32)[sequence], paged_cache.max_sequence_len(record))
    if left is not None:
        low = jnp.maximum(low, position - left)
    if right is not None:
        high = jnp.minimum(high, position + rows + right)
    if record.chunk_size is not None:
        size = record.chunk_size
        low = jnp.maximum(low, position // size * size)
        high = jnp.minimum(high, ((position + rows - 1) // size + 1) * size)
    low = jnp.maximum(low, 0)
    return low, jnp.where(rows > 0, jnp.maximum(high, low), low)
