"""The work list: one item for every tile of query rows of one sequence.

XLA computes the list on the device from lengths that may be traced. Its size is static: q tokens of n sequences have at
most `q // tile + n` tiles that are not empty. The kernel reads it from scalar memory, one array per field.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

ITEM_FIELDS = (
    "sequence", "first_row", "num_tokens", "first_position", "first_key", "end_key", "first_page", "end_page",
    "first_block", "end_block", "missing_pages", "first_token", "num_new_tokens",
)  # fmt: skip


class WorkList(NamedTuple):
    """The kernel's work list, and the index arrays that pack its queries and unpack its results.

    Attributes:
        work_items: int32 [fields * W], in the order of `ITEM_FIELDS`. For each item: its sequence; its first row in the
            packed queries; its number of tokens; the position of the first; the first key that any of its rows attends,
            and one more than the last; the same range in pages and in blocks, with at least one block; whether a page
            in the range is missing; and the first token and number of tokens of the sequence to write to the cache, 0
            except in the sequence's first item.
        first_item_of_core: int32 [cores + 1], the first item of each core, and the number of items.
        page_table: int32 [N * pages per sequence + pages of a block], indices of pages; -1 for missing pages.
        token_at_index: int32 [Tp], the token at each index of the packed queries; T at padding.
        packed_index: int32 [T], the index of each token in the packed queries; 0 for padding tokens.
        is_in_sequence: bool [T], whether a token belongs to a sequence.
        item_of_token: int32 [T], the work item of each token.
        offset_in_item: int32 [T], the index of each token in its work item.
        context_lengths: int32 [N], tokens of each sequence before its queries; None if no term of the scores needs
            them.
    """

    work_items: jax.Array
    first_item_of_core: jax.Array
    page_table: jax.Array
    token_at_index: jax.Array
    packed_index: jax.Array
    is_in_sequence: jax.Array
    item_of_token: jax.Array
    offset_in_item: jax.Array
    context_lengths: jax.Array | None = None


def make_work_list(record: PagedAttention, spec: PagedSpec, row_positions: jax.Array | None = None) -> WorkList:
    """Returns the work list of a record.

    Args:
        record: The record.
        spec: The kernel's constants.
        row_positions: int32 [T], the position of each query row, if the rows of a tile belong to several sequences and
            the mask reads them; -1 for rows of no sequence.
    """
    starts, lengths = paged_cache.query_ranges(record)
    first_item, total, sequence, num_skipped, tokens, position = paged_cache.query_tiles(record, spec.tokens_per_tile)
    stride, multiple = spec.packed_token_stride, spec.sequence_token_multiple
    # Each work item begins at a row where a copy may begin, so packed queries have gaps.
    padded = cdiv(lengths * stride, multiple) * multiple
    base = jnp.cumsum(padded, dtype=jnp.int32) - padded
    last_position = position + tokens - 1
    if row_positions is not None:
        row = starts[sequence] + num_skipped
        position, last_position = _position_range_of_rows(row_positions, row, tokens, spec.tokens_per_tile)
    low, high = _key_range(record, spec, sequence, (position, last_position), tokens)
    tables, first = _page_tables(record), (num_skipped == 0) & (tokens > 0)
    fields = {
        "sequence": sequence,
        "first_row": (base[sequence] + num_skipped * stride) * spec.group_size,
        "num_tokens": tokens,
        # Positions of rows are then relative to the sequence.
        "first_position": position if row_positions is None else jnp.zeros_like(position),
        **_key_range_fields(spec, low, high),
        "missing_pages": _has_missing_pages(tables, spec, sequence, low, high),
        "first_token": starts[sequence],
        # The first item of each sequence writes all of the sequence's new tokens.
        "num_new_tokens": jnp.where(first, lengths[sequence], 0),
    }
    return WorkList(
        work_items=jnp.concatenate([fields[name].astype(jnp.int32) for name in ITEM_FIELDS]),
        # The fixed cost of an item is estimated as that of one more chunk of keys.
        first_item_of_core=_first_items_of_cores(
            spec,
            first if record.new_keys is not None else tokens > 0,
            jnp.where(tokens > 0, high - low + spec.chunk_kv, 0),
            total,
        ),
        # The kernel looks up several pages at once, which may go beyond the last sequence's pages.
        page_table=jnp.pad(tables.reshape(-1), (0, spec.pages_per_block), constant_values=-1),
        token_at_index=_token_of_packed_row(record, spec, (starts, lengths), (base, base + padded)),
        context_lengths=record.kv_lens.astype(jnp.int32) - lengths if spec.reads_context_lengths else None,
        **_token_fields(record, spec, starts, base, first_item),
    )


def _key_range_fields(spec: PagedSpec, low: jax.Array, high: jax.Array) -> dict[str, jax.Array]:
    """Returns the fields of work items that follow from their first key and the end of their keys."""
    return {
        "first_key": low,
        "end_key": high,
        "first_page": low // spec.cache_layout.slots_per_page,
        "end_page": cdiv(high, spec.cache_layout.slots_per_page),
        "first_block": low // spec.block_kv,
        # At least one block: an item without keys has an output too, which is written after its loop.
        "end_block": jnp.maximum(cdiv(high, spec.block_kv), low // spec.block_kv + 1),
    }


def _token_fields(
    record: PagedAttention,
    spec: PagedSpec,
    query_starts: jax.Array,
    packed_starts: jax.Array,
    first_item_of_sequence: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the fields of the work list that have an entry for each query token."""
    owner, _ = paged_cache.token_sequences_and_positions(record)
    inside = jnp.arange(owner.shape[0], dtype=jnp.int32) - query_starts[owner]
    in_sequence = owner >= 0
    return {
        "packed_index": jnp.where(in_sequence, packed_starts[owner] + inside * spec.packed_token_stride, 0),
        "is_in_sequence": in_sequence,
        "item_of_token": jnp.where(in_sequence, first_item_of_sequence[owner] + inside // spec.tokens_per_tile, 0),
        "offset_in_item": jnp.where(in_sequence, inside % spec.tokens_per_tile, 0),
    }


def _position_range_of_rows(
    row_positions: jax.Array, first_row: jax.Array, tokens: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and the largest position of the query rows of tiles of `tokens` rows, at most `size`."""
    offset = jnp.arange(size, dtype=jnp.int32)
    positions = row_positions.at[first_row[:, None] + offset].get(mode="fill", fill_value=-1)
    is_query = (offset < tokens[:, None]) & (positions >= 0)
    largest = jnp.max(jnp.where(is_query, positions, 0), axis=1)
    return jnp.min(jnp.where(is_query, positions, largest[:, None]), axis=1), largest


def _key_range(
    record: PagedAttention,
    spec: PagedSpec,
    sequence: jax.Array,
    positions: tuple[jax.Array, jax.Array],
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the first key, and one more than the last key, of tiles of `num_tokens` rows with these first and last
    positions.
    """
    first, last = positions
    low = jnp.zeros_like(first) if record.kv_starts is None else record.kv_starts.astype(jnp.int32)[sequence]
    high = jnp.minimum(record.kv_lens.astype(jnp.int32)[sequence], paged_cache.max_sequence_len(record))
    if spec.window_left is not None:
        low = jnp.maximum(low, first - spec.window_left)
    if spec.window_right is not None:
        high = jnp.minimum(high, last + spec.window_right + 1)
    if spec.attention_chunk is not None:
        size = spec.attention_chunk
        low = jnp.maximum(low, first // size * size)
        high = jnp.minimum(high, (last // size + 1) * size)
    low = jnp.maximum(low, 0)
    # A tile without keys begins at 0, so that nothing is copied or computed for it.
    has_keys = (num_tokens > 0) & (high > low)
    return jnp.where(has_keys, low, 0), jnp.where(has_keys, high, 0)


def _page_tables(record: PagedAttention) -> jax.Array:
    """Returns the page tables, int32 [N, entries], with -1 for entries that are not pages of the cache."""
    if record.block_tables is None:
        return jnp.arange(record.kv_lens.shape[0], dtype=jnp.int32)[:, None]
    tables = record.block_tables.astype(jnp.int32)
    return jnp.where((tables >= 0) & (tables < paged_cache.page_count(record)), tables, -1)


def _has_missing_pages(
    tables: jax.Array, spec: PagedSpec, sequence: jax.Array, first_key: jax.Array, end_key: jax.Array
) -> jax.Array:
    """Returns whether a page between two keys is missing."""
    # Cumulative sums over the table: any range of pages then takes two look-ups.
    num_absent = jnp.cumsum(jnp.pad(tables < 0, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    first, end = first_key // spec.cache_layout.slots_per_page, cdiv(end_key, spec.cache_layout.slots_per_page)
    return (num_absent[sequence, end] - num_absent[sequence, jnp.minimum(first, end)]) > 0


def _first_items_of_cores(
    spec: PagedSpec, can_begin: jax.Array, item_costs: jax.Array, num_items: jax.Array
) -> jax.Array:
    """Returns the first item of each core's part, an item where a part can begin, chosen so that parts cost about the
    same.

    Where tokens are written, a part begins with a sequence, since the tokens that its first item writes are read by its
    other items.
    """
    before = jnp.cumsum(item_costs) - item_costs
    entry = jnp.arange(item_costs.shape[0], dtype=jnp.int32)
    share = jnp.sum(item_costs) / spec.num_cores
    begins = [
        jnp.min(jnp.where(can_begin & (before >= part * share), entry, num_items), initial=num_items)
        for part in range(1, spec.num_cores)
    ]
    return jnp.stack([jnp.int32(0), *(x.astype(jnp.int32) for x in begins), num_items])


def _token_of_packed_row(
    record: PagedAttention,
    spec: PagedSpec,
    query_ranges: tuple[jax.Array, jax.Array],
    packed_ranges: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Returns the token at every index of the packed queries; T at padding.

    Args:
        record: The record.
        spec: The kernel's constants.
        query_ranges: First query row and number of query rows of each sequence.
        packed_ranges: First index of each sequence in the packed queries, and one more than its last.
    """
    (starts, lengths), (packed_starts, packed_ends) = query_ranges, packed_ranges
    total, sequences = record.query.shape[0], starts.shape[0]
    multiple, stride = spec.sequence_token_multiple, spec.packed_token_stride
    bound = sequences * multiple if record.query_start is None else total * stride + sequences * (multiple - 1)
    if spec.has_equal_products:  # a tile may be larger than the call
        bound = max(bound, spec.tokens_per_tile)
    index = jnp.arange(cdiv(bound, multiple) * multiple, dtype=jnp.int32)
    # The array's size is a static bound, lengths are not: indices after the last sequence have no token.
    sequence = jnp.minimum(jnp.searchsorted(packed_ends, index, side="right"), sequences - 1)
    offset = index - packed_starts[sequence]
    has_token = (offset % stride == 0) & (offset < lengths[sequence] * stride)
    return jnp.where(has_token, starts[sequence] + offset // stride, total)
