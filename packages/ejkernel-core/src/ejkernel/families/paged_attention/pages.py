"""Finds, reads and writes the tokens of sequences in a cache of pages.

Sequence n keeps its token at position k in page `block_tables[n, k // S]`, slot `k % S`. A position is *absent* where
the table has no entry for it, or an entry that is no page of the cache (padding such as -1): no query
attends to an absent key, and absent tokens are never written.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention.record import PagedAttention
from ejkernel.planning import turboquant
from ejkernel.planning.sorted_search import count_at_most

COMBINED_LAYOUT = "pshcd"
"""The layout in which one array holds keys (component 0) and values (component 1)."""

LATENT_LAYOUT = "psd"
"""The layout of latent vectors, which all query heads attend to: one array without an axis of heads."""

LANES = 128
"""Numbers in a row of a combined cache, or a multiple; keys and values of 64 share a row."""

NEW_TOKENS_BY_PAGES = {"key_pages": "new_keys", "value_pages": "new_values"}
"""Pages -> what is written to them, of caches with keys and values apart."""

NEW_CODES_BY_PAGES = {
    "key_pages": "new_keys",
    "key_signs": "new_key_signs",
    "key_norms": "new_key_norms",
    "value_pages": "new_values",
    "value_norms": "new_value_norms",
}
"""The same of caches of codes, in the order in which the written pages are returned."""

LAYOUTS = ("pshd", "phsd", "hpsd", COMBINED_LAYOUT, LATENT_LAYOUT)
"""Orders of a cache's axes, a letter each: page, slot, head, component, size."""


def values_per_32_bits(dtype: Any) -> int:
    """Returns rows of a combined cache that are kept side by side: as many numbers as 32 bits hold."""
    return max(1, 4 // jnp.dtype(dtype).itemsize)


def page_count(record: PagedAttention) -> int:
    """Returns pages of the cache."""
    return record.key_pages.shape[record.kv_layout.index("p")]


def page_size(record: PagedAttention) -> int:
    """Returns slots of a page."""
    return record.key_pages.shape[record.kv_layout.index("s")]


def kv_heads(record: PagedAttention) -> int:
    """Returns KV heads, without those that only pad the cache."""
    if record.kv_layout == LATENT_LAYOUT:
        return 1
    return record.kv_heads or record.key_pages.shape[record.kv_layout.index("h")]


def value_head_dim(record: PagedAttention) -> int:
    """Returns size of a value, and of the output."""
    if record.latent is not None:
        return record.latent[0]
    if record.code_bits is not None and record.value_pages is not None:
        return record.value_pages.shape[-1] * 8 // record.code_bits[1]
    return record.query.shape[-1] if record.value_pages is None else record.value_pages.shape[-1]


def max_sequence_len(record: PagedAttention) -> int:
    """Returns the longest sequence that the tables can describe."""
    entries = 1 if record.block_tables is None else record.block_tables.shape[1]
    return entries * page_size(record)


def num_live_sequences(record: PagedAttention) -> jax.Array | None:
    """Returns how many of the sequences are live, a scalar; None for all."""
    counts = record.num_seqs
    return counts[-1] if counts is not None and counts.ndim else counts


def query_ranges(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Returns first row and number of rows of every sequence's queries, [N] int32; 0 rows from `num_seqs` on."""
    sequences = record.kv_lens.shape[0]
    if record.query_start is None:
        return jnp.arange(sequences, dtype=jnp.int32), jnp.ones(sequences, jnp.int32)
    starts = record.query_start.astype(jnp.int32)
    lengths = jnp.maximum(jnp.diff(starts), 0)
    live = num_live_sequences(record)
    if live is not None:
        lengths = jnp.where(jnp.arange(sequences) < live, lengths, 0)
    return starts[:-1], lengths


class QueryRowLimits(NamedTuple):
    """Sequences with so many query rows, from the least to the most."""

    min_rows: int
    max_rows: int


class QueryTiles(NamedTuple):
    """Tiles of query rows, each of one sequence, in the order of sequences. All int32.

    Attributes:
        first: [N], number of a sequence's first tile.
        total: [], tiles that have rows; those from there on have none.
        sequence: [W].
        row_offset: [W], rows of the sequence before the tile.
        rows: [W], rows of the tile.
        position: [W], of its first row.
    """

    first: jax.Array
    total: jax.Array
    sequence: jax.Array
    row_offset: jax.Array
    rows: jax.Array
    position: jax.Array


def query_tiles(
    record: PagedAttention, size: int, count_multiple: int = 1, lengths: QueryRowLimits | None = None
) -> QueryTiles:
    """Returns the query rows of sequences in tiles of at most `size`, as many as there can be.

    Args:
        record: The record.
        size: Rows of a tile.
        count_multiple: The number of tiles is one of it.
        lengths: The sequences that have tiles, by their rows; None for all.
    """
    starts, rows_of = query_ranges(record)
    sequences = starts.shape[0]
    bound = sequences if record.query_start is None else record.query.shape[0] // size + sequences
    if lengths is not None:
        rows_of = jnp.where((rows_of >= lengths.min_rows) & (rows_of <= lengths.max_rows), rows_of, 0)
        # At most `among` sequences have `lengths.least` rows, and none has more tiles than `lengths.most` rows need.
        among = min(sequences, record.query.shape[0] // max(1, lengths.min_rows))
        bound = min(
            record.query.shape[0] // size + among, among * cdiv(min(lengths.max_rows, record.query.shape[0]), size)
        )
    count = cdiv(rows_of, size)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    tile = jnp.arange(cdiv(bound, count_multiple) * count_multiple, dtype=jnp.int32)
    tile_sequence = count_at_most(ends, tile)
    sequence = jnp.minimum(tile_sequence, starts.shape[0] - 1)
    skipped = (tile - (ends - count)[sequence]) * size
    rows = jnp.where(tile < ends[-1], jnp.clip(rows_of[sequence] - skipped, 0, size), 0)
    position = record.kv_lens.astype(jnp.int32)[sequence] - rows_of[sequence] + skipped
    return QueryTiles(ends - count, ends[-1], sequence, skipped, rows, position)


def token_sequences_and_positions(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Returns the sequence (-1 for none) and the position of every query row, [T] int32."""
    starts, lengths = query_ranges(record)
    token = jnp.arange(record.query.shape[0], dtype=jnp.int32)
    ends = lax.cummax(jnp.where(lengths > 0, starts + lengths, 0))
    token_sequence = count_at_most(ends, token)
    sequence = jnp.minimum(token_sequence, starts.shape[0] - 1)
    offset = token - starts[sequence]
    in_sequence = (token_sequence == sequence) & (offset >= 0) & (offset < lengths[sequence])
    position = record.kv_lens.astype(jnp.int32)[sequence] - lengths[sequence] + offset
    return jnp.where(in_sequence, sequence, -1), jnp.where(in_sequence, position, 0)


def find_pages_and_slots(
    record: PagedAttention, sequence: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the page and the slot of each position of some sequences.

    Args:
        record: The record.
        sequence: int32; negative for none.
        position: int32, broadcastable with it; negative for none.

    Returns:
        Page and slot, int32; the page of what is absent is the number of pages, one more than there are.
    """
    pages, size = page_count(record), page_size(record)
    sequence, position = jnp.broadcast_arrays(sequence, position)
    present = (sequence >= 0) & (position >= 0)
    sequence, position = jnp.where(present, sequence, 0), jnp.where(present, position, 0)
    if record.shared_prefix is not None:
        sequence = jnp.where(position < record.shared_prefix, 0, sequence)
    if record.block_tables is None:
        page, slot, present = sequence, position, present & (position < size)
    else:
        tables = record.block_tables.astype(jnp.int32)
        page, slot = tables.at[sequence, position // size].get(mode="fill", fill_value=-1), position % size
    return jnp.where(present & (page >= 0) & (page < pages), page, pages), slot


def load_keys_and_values(
    record: PagedAttention, page: jax.Array, slot: jax.Array, head: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values at given places; 0 where the page does not belong to the cache, whatever the
    cache holds.

    Args:
        record: The record.
        page: int32, as `find_pages_and_slots` gives it.
        slot: int32, broadcastable with it.
        head: int32 KV heads, broadcastable with both.

    Returns:
        Keys [..., D] and values [..., Dv] in the caches' dtypes; of codes in that of scores.
    """
    if record.latent is not None:
        page, slot, _ = jnp.broadcast_arrays(page, slot, head)
        rows_at = record.key_pages.at[page, slot].get(mode="fill", fill_value=0)
        return _latent_keys(record, rows_at), rows_at[..., : record.latent[0]]
    if record.code_bits is not None:
        return decode_keys_and_values(record, (page, slot, head))
    places = {"p": page, "s": slot, "h": head}

    def load_component(pages: jax.Array, component: int, size: int) -> jax.Array:
        index = tuple(jnp.int32(component) if axis == "c" else places[axis] for axis in record.kv_layout[:-1])
        return pages.at[index].get(mode="fill", fill_value=0)[..., :size]

    values = record.key_pages if record.value_pages is None else record.value_pages
    return load_component(record.key_pages, 0, record.query.shape[-1]), load_component(
        values, 1, value_head_dim(record)
    )


def decode_keys_and_values(record: PagedAttention, index: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns keys [..., D] and values [..., Dv] of a cache of codes, in the dtype in which scores are accumulated.

    Args:
        record: The record.
        index: Page, slot and head of each token, broadcastable; 0 is returned where the page is none of the cache.
    """
    dtype = jnp.promote_types(record.query.dtype, jnp.float32)
    key_bits, value_bits = record.code_bits or (0, 0)

    def load(name: str) -> jax.Array:
        return _required_field(record, name).at[index].get(mode="fill", fill_value=0)

    signs = None if record.key_signs is None else load("key_signs")
    keys = turboquant.decode_keys(
        load("key_pages"), signs, load("key_norms").astype(dtype), _required_field(record, "key_codebook"), key_bits
    )
    values = turboquant.decode_vectors(
        load("value_pages"), load("value_norms").astype(dtype), _required_field(record, "value_codebook"), value_bits
    )
    return keys, values


def _required_field(record: PagedAttention, name: str) -> jax.Array:
    """Returns an array that a cache of codes has to have."""
    value = getattr(record, name)
    if value is None:
        raise ValueError(f"{name}: got None, wants an array with code_bits={record.code_bits}")
    return value


def _latent_keys(record: PagedAttention, rows: jax.Array) -> jax.Array:
    """Returns keys [..., D] of rows of a latent cache: the latent vector and the columns with rotary position."""
    size, start = record.latent or (0, 0)
    rotary = record.query.shape[-1] - size
    return jnp.concatenate((rows[..., :size], rows[..., start : start + rotary]), axis=-1)


def write_new_tokens(record: PagedAttention) -> tuple[PagedAttention, tuple[jax.Array, ...]]:
    """Returns the record with `new_keys` and `new_values` in its pages, and those pages.

    Token i of a sequence that has q query rows goes to position `kv_len - q + i`. Only slots of tokens are touched:
    rows of no sequence and absent positions are dropped. Where the caches are donated, XLA writes in place. (On the CPU
    it copies floating caches of less than 32 bits, which it can only change as float32.)
    """
    if record.new_keys is None:
        return record, ()
    at = find_pages_and_slots(record, *token_sequences_and_positions(record))
    if record.latent is not None:
        pages = (_write_latent_tokens(record, *at),)
        return _without_new_tokens(record, key_pages=pages[0]), pages
    if record.new_values is None:
        return record, ()
    if record.kv_layout == COMBINED_LAYOUT:
        shape = record.key_pages.shape
        stored = record.key_pages.reshape(_combined_cache_shape(record.key_pages))
        tokens = _combined_cache_rows(record.new_keys, record.new_values, record.key_pages).reshape(
            -1, *stored.shape[2:]
        )
        pages = (stored.at[at].set(tokens, mode="drop").reshape(shape),)
        return _without_new_tokens(record, key_pages=pages[0]), pages
    new_by_pages = NEW_TOKENS_BY_PAGES if record.code_bits is None else NEW_CODES_BY_PAGES
    stored = {pages: x for pages in new_by_pages if (x := getattr(record, pages)) is not None}
    written = {
        pages: x.at[at].set(_required_field(record, new_by_pages[pages]).astype(x.dtype), mode="drop")
        for pages, x in stored.items()
    }
    return _without_new_tokens(record, **written), tuple(written.values())


def _without_new_tokens(record: PagedAttention, **pages: Any) -> PagedAttention:
    unwritten = {name: None for name in NEW_CODES_BY_PAGES.values() if getattr(record, name) is not None}
    return dataclasses.replace(record, **unwritten, **pages)


def _combined_cache_shape(pages: jax.Array) -> tuple[int, ...]:
    """Returns how callers keep a combined cache [P, S, G, 2, L]: [P, S, rows, pack, lanes].

    Written in another shape, with an axis of size 1 in one of them, it would be copied by XLA's CPU backend, which
    gives that axis a layout of its own and has to undo it.
    """
    count, slots, heads, components, size = pages.shape
    pack, lanes = values_per_32_bits(pages.dtype), max(size, LANES)
    rows, rest = divmod(heads * components * size, pack * lanes)
    return pages.shape if rest else (count, slots, rows, pack, lanes)


def _write_latent_tokens(record: PagedAttention, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the pages of a latent cache with the new tokens in them, written in the shape in which callers keep it.

    As with `_combined_cache_shape`, an axis of size 1 must not come or go.
    """
    assert record.latent is not None
    assert record.new_keys is not None
    (count, slots, lanes), pack = record.key_pages.shape, values_per_32_bits(record.key_pages.dtype)
    pack = pack if slots % pack == 0 else 1
    tokens = _latent_cache_rows(record.new_keys[:, 0], record.latent, record.key_pages)
    stored = record.key_pages.reshape(count, slots // pack, pack, lanes)
    return stored.at[page, slot // pack, slot % pack].set(tokens, mode="drop").reshape(count, slots, lanes)


def _latent_cache_rows(tokens: jax.Array, size_and_rotary_start: tuple[int, int], pages: jax.Array) -> jax.Array:
    """Returns tokens [T, D] as rows [T, L] of a latent cache, 0 in the lanes that only pad it."""
    (size, start), tokens = size_and_rotary_start, tokens.astype(pages.dtype)
    rest = pages.shape[-1] - start - (tokens.shape[-1] - size)
    first = jnp.pad(tokens[:, :size], ((0, 0), (0, start - size)))
    return jnp.concatenate((first, jnp.pad(tokens[:, size:], ((0, 0), (0, rest)))), axis=-1)


def _combined_cache_rows(keys: jax.Array, values: jax.Array, pages: jax.Array) -> jax.Array:
    """Returns tokens [T, Hk, D] as rows [T, G, 2, L] of a combined cache, 0 in the heads and lanes that only pad it."""
    rows = jnp.stack((keys, values), axis=2).astype(pages.dtype)
    padding = [(0, 0), *((0, wants - has) for has, wants in zip(rows.shape[1:], pages.shape[2:], strict=True))]
    return jnp.pad(rows, padding)
