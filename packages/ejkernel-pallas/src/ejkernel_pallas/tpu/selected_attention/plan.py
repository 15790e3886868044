"""Computes the work lists of the selected branch, and arranges its arrays for the kernels.

Blocks of more than 128 keys are split, and every part is read by the queries that list its block. Two neighbours that
have no more together are one part, which a query that lists both reads once. The lists of blocks
are inverted for each tile of queries:

    block_indices [T, N]  ── sort by (part, limit, query) ──►  | readers of part 0 ..... | of part 1 .. | ...
    items                                                       | R | R | R, filled up   | R | ...
    work list     | first item of every tile of keys | empty x 2 | part, R readers | ... | empty x 2 | part, ...

An item is one product: R queries of a tile that read the same part. An entry of a reader holds the query's index in its
tile, and how many keys of the part it attends to. Lists have room for all that N blocks per query can need, so that
nothing is compiled anew when they change. Kernels get the list of one tile of queries at a time in SMEM.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, query_positions, starts
from ejkernel_pallas.tpu.selected_attention.config import NUM_PIPELINE_STAGES, header_words
from ejkernel_pallas.tpu.selected_attention.spec import LIMIT_BITS, TOKEN_BITS, SelectedSpec

NUM_EMPTY_ITEMS = NUM_PIPELINE_STAGES - 1
"""Empty items before and after the items of each tile of keys."""


class KeyParts(NamedTuple):
    """The parts of blocks.

    Attributes:
        starts: int32 [parts], the first key of every part.
        ends: int32 [parts], the key after the last of the part's block.
    """

    starts: jax.Array
    ends: jax.Array


def make_key_parts(record: SelectedAttention, spec: SelectedSpec) -> KeyParts:
    """Returns the parts of a record's blocks; a block ends where the next one starts."""
    block_starts, keys = starts(record), record.key.shape[1]
    if spec.blocks_per_part == 2:
        first = block_starts[::2].astype(jnp.int32)
        return KeyParts(first, jnp.minimum(first + spec.keys_per_part, keys))
    next_starts = jnp.concatenate([block_starts[1:], jnp.full(1, keys, block_starts.dtype)])
    ends = jnp.minimum(jnp.minimum(block_starts + record.block_size, next_starts), keys)
    first = block_starts[:, None] + jnp.arange(spec.parts_per_block, dtype=jnp.int32) * spec.keys_per_part
    return KeyParts(first.reshape(-1).astype(jnp.int32), jnp.repeat(ends, spec.parts_per_block).astype(jnp.int32))


def work_lists(record: SelectedAttention, spec: SelectedSpec) -> jax.Array:
    """Returns the work list of every tile of queries, int32 [B, Hk, query tiles, 1, words]."""
    part, entry = _sorted_entries(record, spec)
    ids = jnp.arange(spec.num_parts + 1, dtype=jnp.int32)
    shape = part.shape[:-1]
    part, entry = (x.reshape(-1, x.shape[-1]) for x in (part, entry))
    bounds = jax.vmap(lambda x: jnp.searchsorted(x, ids, method="scan_unrolled").astype(jnp.int32))(part)
    item_ends = jnp.cumsum(cdiv(jnp.diff(bounds), spec.readers_per_product), axis=-1, dtype=jnp.int32)
    tiles = jnp.arange(header_words(spec.num_key_tiles), dtype=jnp.int32)
    tile_parts = jnp.minimum(tiles * spec.parts_per_tile, spec.num_parts)
    header = jnp.pad(item_ends, ((0, 0), (1, 0)))[:, tile_parts] + NUM_EMPTY_ITEMS * (tiles + 1)
    items = jax.vmap(functools.partial(_items_of_query_tile, spec=spec))(entry, bounds, item_ends, header)
    words = jnp.concatenate([header, items.reshape(items.shape[0], -1)], axis=1)
    words = jnp.pad(words, ((0, 0), (0, spec.words_per_work_list - words.shape[1])))
    return words.reshape(*shape, 1, spec.words_per_work_list)


def _sorted_entries(record: SelectedAttention, spec: SelectedSpec) -> tuple[jax.Array, jax.Array]:
    """Returns the part and the entry of every reader, sorted, both int32 [B, Hk, query tiles, readers of a tile];
    unused ones come last.
    """
    indices, parts = record.block_indices, make_key_parts(record, spec)
    assert indices is not None  # selected before
    first = jnp.maximum(indices, 0)[..., None] * spec.parts_per_block
    part = (first + jnp.arange(spec.parts_per_block, dtype=jnp.int32)) // spec.blocks_per_part
    is_second = first % spec.blocks_per_part
    begin, end = (n * (spec.keys_per_part // spec.blocks_per_part) for n in (is_second, is_second + 1))
    last = jnp.minimum(query_positions(record)[:, :, None, None, None], parts.ends[part] - 1)
    limit = jnp.minimum(last - parts.starts[part] + 1, end)
    used = (indices >= 0)[..., None] & (limit > begin)
    if record.q_segment_ids is not None:
        used &= (record.q_segment_ids >= 0)[:, :, None, None, None]
    if spec.blocks_per_part == 2:
        used, limit, is_second = _join_blocks_of_part(used, part, limit, is_second)
    token = (jnp.arange(spec.num_tokens, dtype=jnp.int32) % spec.block_q)[:, None, None, None]
    entry = jnp.where(used, token | limit << TOKEN_BITS | is_second << TOKEN_BITS + LIMIT_BITS, spec.filler_token)
    part = jnp.where(used, part, spec.num_parts)

    def group_by_query_tile(x: jax.Array, fill_value: int) -> jax.Array:
        padding = spec.num_query_tiles * spec.block_q - spec.num_tokens
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * 3), constant_values=fill_value)
        x = x.reshape(x.shape[0], spec.num_query_tiles, spec.block_q, *x.shape[2:]).transpose(0, 3, 1, 2, 4, 5)
        return x.reshape(*x.shape[:3], -1)

    first, second = lax.sort(
        (group_by_query_tile(part, spec.num_parts), group_by_query_tile(entry, spec.filler_token)), num_keys=2
    )
    return first, second


def _join_blocks_of_part(
    used: jax.Array, part: jax.Array, limit: jax.Array, is_second: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Joins what a query lists of a part, in arrays [B, T, Hk, N, 1], into the first of its entries."""
    slot = jnp.arange(used.shape[3])
    of_part = used & used.swapaxes(3, 4) & (part == part.swapaxes(3, 4))  # [B, T, Hk, N, N]
    is_first = ~jnp.any(of_part & (slot < slot[:, None]), axis=4, keepdims=True)
    limit = jnp.max(jnp.where(of_part, limit.swapaxes(3, 4), 0), axis=4, keepdims=True)
    is_second = jnp.min(jnp.where(of_part, is_second.swapaxes(3, 4), 1), axis=4, keepdims=True)
    return used & is_first, limit, is_second


def _items_of_query_tile(
    entry: jax.Array, bounds: jax.Array, item_ends: jax.Array, header: jax.Array, spec: SelectedSpec
) -> jax.Array:
    """Returns the items of one tile of queries, int32 [items, 1 + readers]: the part, and the entries of its readers.
    Those before and after the items of a tile of keys have the filler token as their only reader.
    """
    index = jnp.arange(spec.max_items_per_query_tile, dtype=jnp.int32)
    tile = jnp.searchsorted(header[:-1], index, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    empty = (tile < 0) | (index >= header[jnp.maximum(tile, 0) + 1] - NUM_EMPTY_ITEMS)
    item = index - NUM_EMPTY_ITEMS * (tile + 1)
    part = jnp.minimum(jnp.searchsorted(item_ends, item, side="right", method="scan_unrolled"), spec.num_parts - 1)
    first_item = jnp.where(part > 0, item_ends[part - 1], 0)
    position = (bounds[part] + (item - first_item) * spec.readers_per_product)[:, None] + jnp.arange(
        spec.readers_per_product
    )
    inside = (position < bounds[part + 1][:, None]) & ~empty[:, None]
    readers = jnp.where(inside, entry[jnp.clip(position, 0, entry.shape[0] - 1)], spec.filler_token)
    return jnp.concatenate([part.astype(jnp.int32)[:, None], readers], axis=1)


def last_key_tiles(packed_work_lists: jax.Array, spec: SelectedSpec) -> jax.Array:
    """Returns the last tile of keys that each tile of queries reads, int32 [B * Hk * query tiles]."""
    words = header_words(spec.num_key_tiles)
    header = packed_work_lists[..., 0, :words] - NUM_EMPTY_ITEMS * jnp.arange(words, dtype=jnp.int32)
    return jnp.maximum(jnp.sum(header[..., :-1] < header[..., -1:], axis=-1, dtype=jnp.int32) - 1, 0).reshape(-1)


def arrange_query_rows(x: jax.Array, spec: SelectedSpec, width: int) -> jax.Array:
    """Returns [B, T, H, D] as [B, Hk, padded T, rows, width]."""
    batch, tokens, heads, size = x.shape
    x = (
        x.reshape(batch, tokens, heads // spec.group_size, spec.group_size, size)
        .transpose(0, 2, 1, 3, 4)
        .astype(spec.row_dtype)
    )
    padding = spec.num_query_tiles * spec.block_q - tokens
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, spec.rows_per_token - spec.group_size), (0, width - size)))


def restore_query_rows(x: jax.Array, spec: SelectedSpec, size: int) -> jax.Array:
    """Returns [B, Hk, padded T, rows, width] as [B, T, H, D]."""
    x = x[:, :, : spec.num_tokens, : spec.group_size, :size].transpose(0, 2, 1, 3, 4)
    return x.reshape(*x.shape[:2], -1, size)


def arrange_row_statistics(x: jax.Array, spec: SelectedSpec) -> jax.Array:
    """Returns float32 [B, H, T] as [B, Hk, rows of all tokens / 128, 128]."""
    batch, heads, tokens = x.shape
    x = x.reshape(batch, heads // spec.group_size, spec.group_size, tokens).swapaxes(2, 3)
    padding = spec.num_query_tiles * spec.block_q - tokens
    x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, spec.rows_per_token - spec.group_size)))
    return x.reshape(*x.shape[:2], -1, 128)


def restore_row_statistics(x: jax.Array, spec: SelectedSpec) -> jax.Array:
    """Returns [B, Hk, rows of all tokens / 128, 128] as [B, H, T]."""
    x = x.reshape(*x.shape[:2], -1, spec.rows_per_token)[:, :, : spec.num_tokens, : spec.group_size].swapaxes(2, 3)
    return x.reshape(x.shape[0], -1, spec.num_tokens)


def split_keys_into_parts(x: jax.Array, record: SelectedAttention, spec: SelectedSpec, width: int) -> jax.Array:
    """Returns keys or values [B, S, Hk, D] as the parts of blocks, [B, Hk, padded parts, keys, width]."""
    padded_parts = spec.num_key_tiles * spec.parts_per_tile
    if _is_contiguous(record, spec):
        length = padded_parts * spec.padded_keys_per_part
        x = jnp.pad(x[:, :length], ((0, 0), (0, max(0, length - x.shape[1])), (0, 0), (0, width - x.shape[3])))
        return x.reshape(x.shape[0], padded_parts, spec.padded_keys_per_part, *x.shape[2:]).transpose(0, 3, 1, 2, 4)
    index, inside = _key_indices(record, spec)
    x = jnp.where(inside[..., None, None], x[:, jnp.minimum(index, x.shape[1] - 1)], 0).transpose(0, 3, 1, 2, 4)
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded_parts - spec.num_parts), (0, 0), (0, width - x.shape[4])))


def merge_key_parts(
    x: jax.Array, keys_or_values: jax.Array, record: SelectedAttention, spec: SelectedSpec
) -> jax.Array:
    """Returns gradients of parts of blocks, as `split_keys_into_parts` returns those, as gradients of [B, S, Hk, D]."""
    batch, length, heads, size = keys_or_values.shape
    x = x.transpose(0, 2, 3, 1, 4)[..., :size]
    if _is_contiguous(record, spec):
        x = x.reshape(batch, -1, heads, size)[:, :length]
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
    index, inside = _key_indices(record, spec)
    index = jnp.where(inside, index, length)
    return jnp.zeros(keys_or_values.shape, x.dtype).at[:, index].add(x[:, : spec.num_parts], mode="drop")


def _is_contiguous(record: SelectedAttention, spec: SelectedSpec) -> bool:
    """Returns whether part n has keys from `n * keys` on."""
    return (
        record.block_starts is None
        and spec.padded_keys_per_part * spec.parts_per_block == record.block_size * spec.blocks_per_part
    )


def _key_indices(record: SelectedAttention, spec: SelectedSpec) -> tuple[Any, Any]:
    """Returns the index of every key of the parts, and whether it is one of the part's, both [parts, keys]."""
    parts, offset = make_key_parts(record, spec), jnp.arange(spec.padded_keys_per_part, dtype=jnp.int32)
    index = parts.starts[:, None] + offset
    return index, (offset < spec.keys_per_part) & (index < parts.ends[:, None])
