"""Lists of key blocks that begin with the documents of a packed row, so that the bits of a document depend on it alone.

    keys             0 . . . . . . . 5 . . . . . . . . . . 16 . . . .     documents begin at 0, 5 and 16
    blocks of 8      [0 to 7]        [5 to 12] [13 to 20]  [16 to 23]     those of the queries of one tile, in order

A block has keys of later documents at its end, which the rows of its document mask. Rows of later documents mask all of
it, since their keys come again in blocks of their documents. So the blocks of other documents add exact zeros to a row.
A list is the union of the blocks that the rows of a tile need, by their first keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.plan.key_ranges import count_smaller_ids
from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import (
    MAX_INT32,
    MAX_REDUCTION,
    MIN_REDUCTION,
    SUM_REDUCTION,
    find_tile_extents,
    reduce_last_axis,
)
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec


class QueryKeys(NamedTuple):
    """The keys of every query, each int32 [B, T].

    Attributes:
        document: The first key of the query's document.
        first: The first key that the query attends to.
        end: The key after the last one; at most `first` if there is none.
    """

    document: jax.Array
    first: jax.Array
    end: jax.Array

    def block_of(self, key: jax.Array, block_kv: int) -> jax.Array:
        """Returns the first key of the block of the query's document that has `key`."""
        return self.document + (key - self.document) // block_kv * block_kv


def are_sorted(ids: tuple[jax.Array, jax.Array], block_q: int, block_kv: int) -> jax.Array:
    """Returns whether the ids of queries and keys are sorted in all rows, with padding before or after them."""
    return ~(find_tile_extents(ids[0], block_q).is_unsorted | find_tile_extents(ids[1], block_kv).is_unsorted).any()


def key_order(k_ids: jax.Array) -> jax.Array:
    """Returns the order of the keys by documents, int32 [B, S]: as they are in each, and padding last."""
    return jnp.argsort(jnp.where(k_ids < 0, MAX_INT32, k_ids), axis=1, stable=True).astype(jnp.int32)


def document_operands(
    spec: HopperSpec,
    ids: tuple[jax.Array, jax.Array],
    block_q: int,
    block_kv: int,
    order: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns the kernel's operands for packed rows.

    Args:
        spec: The kernel's constants.
        ids: Ids of queries [B, T] and keys [B, S], from `pad_segment_ids`; those of keys in `order`.
        block_q: Queries per tile.
        block_kv: Keys per block.
        order: The index of each key in its row, from `key_order`. None if `are_sorted`.

    Returns:
        `ranges` int32 [B, 3, T], the first and the last key of every query, and the first key of its first block;
        `table` and `blocks` as `plan.pattern.key_block_lists` has them, with first keys for the blocks; `padded` int32
        [B, S], whether a block with that first key may have padding.
    """
    keys = query_keys(spec, ids, block_kv, order)
    blocks, table = block_lists(spec, keys, block_q, block_kv, sorts_rows=order is not None)
    has_padding = find_tile_extents(ids[1], block_kv).has_padding
    first_tile = np.arange(ids[1].shape[1], dtype=np.int32) // block_kv
    last_tile = np.minimum(first_tile + 1, has_padding.shape[1] - 1)
    padded = has_padding[:, first_tile] | has_padding[:, last_tile]
    ranges = jnp.stack([keys.first, keys.end - 1, keys.block_of(keys.first, block_kv)], axis=1)
    return {"ranges": ranges, "table": table, "blocks": blocks, "padded": padded.astype(jnp.int32)}


def query_keys(
    spec: HopperSpec, ids: tuple[jax.Array, jax.Array], block_kv: int, order: jax.Array | None = None
) -> QueryKeys:
    """Returns the keys of every query, by their index in `order`."""
    queries, keys = ids
    padding_start = find_tile_extents(keys, block_kv).padding_start.max(axis=1)
    is_range_end = jnp.arange(2, dtype=jnp.int32)[:, None] > 0
    to_find = jnp.broadcast_to(queries[:, None], (queries.shape[0], 2, queries.shape[1]))
    document, end = jnp.moveaxis(
        jax.vmap(count_smaller_ids, in_axes=(0, 0, None, 0))(keys, to_find, is_range_end, padding_start), 1, 0
    )
    row = jnp.arange(queries.shape[1], dtype=jnp.int32)

    def limit(key: jax.Array) -> jax.Array:
        """Returns the index of the first key of each query's document that is not before `key` in the row."""
        if order is None:
            return jnp.clip(key, document, end)
        keys = jnp.broadcast_to(key, document.shape)
        return jax.vmap(count_smaller_ids, in_axes=(0, 0, None, 0, 0))(order, keys, jnp.array(False), end, document)

    first = document if spec.left_window is None else limit(row - spec.left_window)
    end = end if spec.right_window is None else limit(row + spec.right_window + 1)
    return QueryKeys(document, first, end)


def block_lists(
    spec: HopperSpec, keys: QueryKeys, block_q: int, block_kv: int, *, sorts_rows: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the first keys of the blocks of every query tile, int32 [B, tiles, longest list], and the table of their
    ranges, int32 [B, tiles, 4]: first, full_start, full_end, last.

    The first blocks of a tile's rows must not decrease, as those of sorted ids do not, unless `sorts_rows`. A tile
    without work has one block, at key 0.
    """
    table_keys = QueryKeys(*(x.reshape(x.shape[0], -1, block_q) for x in keys))
    document, first, end = table_keys
    has_keys = end > first
    # First keys of a row's first and last block.
    low, high = (table_keys.block_of(x, block_kv) for x in (first, end - 1))
    low, high = jnp.where(has_keys, low, MAX_INT32), jnp.where(has_keys, high, -1)
    lowest = low
    if sorts_rows:
        low, high, document = jax.lax.sort((low, high, document), num_keys=1)
        has_keys = low < MAX_INT32
    is_earlier = np.tri(block_q, k=-1, dtype=bool)
    (before,) = reduce_last_axis([jnp.where(is_earlier, high[..., None, :], -1)], (MAX_REDUCTION,))
    # A row adds the blocks after those of earlier rows, which are either its document's or those of earlier ones.
    added = jnp.where(before >= document, jnp.maximum(low, before + block_kv), low)
    count = jnp.where(has_keys & (high >= added), (high - added) // block_kv + 1, 0)
    (counts_before,) = reduce_last_axis([jnp.where(is_earlier, count[..., None, :], 0)], (SUM_REDUCTION,))
    longest = spec.kv_len // block_kv + block_q
    index = np.arange(longest, dtype=np.int32)
    offset = index[:, None] - counts_before[..., None, :]
    is_of_row = (offset >= 0) & (offset < count[..., None, :])
    entries = jnp.where(is_of_row, added[..., None, :] + offset * block_kv, 0)
    (blocks,) = reduce_last_axis([entries], (SUM_REDUCTION,))
    total = counts_before[..., -1] + count[..., -1]
    return blocks, _block_table(table_keys, lowest, total, block_kv)


def _block_table(keys: QueryKeys, low: Any, total: jax.Array, block_kv: int) -> jax.Array:
    """Returns int32 [B, tiles, 4]. A tile has full blocks only if its rows, [B, tiles, rows], share a document."""
    document, first, end = keys
    reductions = (MIN_REDUCTION, MAX_REDUCTION, MAX_REDUCTION, MIN_REDUCTION, MIN_REDUCTION)
    start, last_start, full_first, full_stop, lowest = reduce_last_axis(
        [document, document, first, end, low], reductions
    )
    # Blocks of the document that all rows attend to, by their index in the document, then in the list.
    full_start, full_end = (full_first - start + block_kv - 1) // block_kv, (full_stop - start) // block_kv
    skipped = (lowest - start) // block_kv
    is_full = (start == last_start) & (full_end > full_start)
    full_start, full_end = (jnp.where(is_full, x - skipped, 0) for x in (full_start, full_end))
    return jnp.stack([jnp.zeros_like(total), full_start, full_end, jnp.maximum(total, 1)], axis=-1)
