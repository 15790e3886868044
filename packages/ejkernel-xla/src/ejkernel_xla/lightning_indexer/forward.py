"""Forward pass of the lightning indexer: an outer loop over tiles of queries, an inner one over tiles of keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer import (
    LightningIndexer,
    TopKeyIndicesAndScores,
    accumulator,
    axes,
    nothing_selected,
    num_keys,
    rectify,
    with_wide_query,
)
from ejkernel.planning.precision import product_precision
from ejkernel_xla.lightning_indexer.config import IndexerTiles, sizes
from ejkernel_xla.lightning_indexer.kernels import running_top_k
from ejkernel_xla.lightning_indexer.plan import RowKeys, load_tile, row_keys
from ejkernel_xla.query_tiles import QueryTile, forward_in_query_tiles, join_tiles, split_into_tiles


def forward(record: LightningIndexer, config: IndexerTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] in the accumulator's dtype. There are no residuals.
    """
    record = with_wide_query(record)
    # `validate` wants heads and channels, so an empty array means that there are no queries or no keys.
    if not record.query.size or not record.key.size or not num_keys(record):
        return nothing_selected(record), ()
    if config.batch_invariant:
        tile = QueryTile(block_q=config.block_q)
        return forward_in_query_tiles(lambda x, _: _selected_keys(x, config), record, axes(record), tile, 1), ()
    return _selected_keys(record, config), ()


def _selected_keys(record: LightningIndexer, config: IndexerTiles) -> TopKeyIndicesAndScores:
    """Returns indices and scores of a record with queries and keys."""
    rows, tokens = record.query.shape[:2]
    bounds = (jnp.broadcast_to(x, (rows, tokens)) for x in (record.key_starts, record.key_ends))
    queries, tables = (record.query, record.weights, *bounds), record.block_tables
    _, block_k = sizes(record, config)
    if tables is None:

        def row(arrays: tuple[Any, ...]) -> TopKeyIndicesAndScores:
            key, scales, *queries = arrays
            return _row(tuple(queries), row_keys(key, scales, None, record, block_k), record, config)

        return lax.map(row, (record.key, record.key_scales, *queries))
    slots = record.key.reshape(-1, record.key.shape[2])
    scales = None if record.key_scales is None else record.key_scales.reshape(-1)

    def row_over_pages(arrays: tuple[Any, ...]) -> TopKeyIndicesAndScores:
        table, *queries = arrays
        return _row(tuple(queries), row_keys(slots, scales, table, record, block_k), record, config)

    return lax.map(row_over_pages, (tables, *queries))


def _row(
    queries: tuple[jax.Array, ...], keys: RowKeys, record: LightningIndexer, config: IndexerTiles
) -> TopKeyIndicesAndScores:
    """Returns the selected keys of one batch row, from its queries, weights, first keys and key ends."""
    query, weights, starts, ends = queries
    block_q, block_k = sizes(record, config)
    # Queries that fill up the last tile have empty ranges of keys.
    tiles = tuple(split_into_tiles(x, block_q) for x in (query, weights, starts, ends))
    select = _select_from_all_scores if config.whole_rows else _select_by_merging
    indices, scores = lax.map(lambda tile: select(tile, keys, record, block_k), tiles)
    return join_tiles(indices, query.shape[0]), join_tiles(scores, query.shape[0])


def _select_by_merging(
    tile: tuple[Any, ...], keys: RowKeys, record: LightningIndexer, block_k: int
) -> TopKeyIndicesAndScores:
    """Returns the selected keys of a tile of queries, each tile of keys merged into the selection so far."""
    query, _, starts, ends = tile
    dtype = accumulator(record)

    def step(n: jax.Array, state: running_top_k.RunningTopK) -> running_top_k.RunningTopK:
        scores = _ordered_scores(tile, keys, record, n * block_k, block_k)
        return running_top_k.merge(state, scores, n * scores.shape[1])

    state = running_top_k.empty(query.shape[0], record.top_k, dtype)
    return running_top_k.selection(lax.fori_loop(*_key_tiles(starts, ends, keys, block_k), step, state), dtype)


def _select_from_all_scores(
    tile: tuple[Any, ...], keys: RowKeys, record: LightningIndexer, block_k: int
) -> TopKeyIndicesAndScores:
    """Returns the selected keys of a tile of queries, whose scores are all in memory, by one sort of each row."""
    query, _, starts, ends = tile
    dtype = accumulator(record)
    integers = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    entries = keys.padded_count // record.block_size
    not_selectable = jnp.full((query.shape[0], entries), jnp.iinfo(integers).min, integers)

    def step(n: jax.Array, rows: jax.Array) -> jax.Array:
        scores = _ordered_scores(tile, keys, record, n * block_k, block_k)
        return lax.dynamic_update_slice_in_dim(rows, scores, n * scores.shape[1], axis=1)

    rows = lax.fori_loop(*_key_tiles(starts, ends, keys, block_k), step, not_selectable)
    return running_top_k.selection(running_top_k.of_rows(rows, record.top_k), dtype)


def _key_tiles(starts: jax.Array, ends: jax.Array, keys: RowKeys, block_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of keys that a query of a tile may select, and the end of these tiles."""
    has_keys = starts < ends
    first = jnp.min(jnp.where(has_keys, starts, keys.padded_count)) // block_k
    return first, cdiv(jnp.max(jnp.where(has_keys, ends, 0)), block_k)


def _ordered_scores(
    tile: tuple[Any, ...], keys: RowKeys, record: LightningIndexer, start: jax.Array, block_k: int
) -> jax.Array:
    """Returns the scores [t, block_k] of the keys from `start` on as integers in the order of numbers, the least
    integer where a query may not select a key; with blocks, the largest of each, [t, block_k / block_size].
    """
    query, weights, starts, ends = tile
    dtype, key = accumulator(record), load_tile(keys, record, start, block_k)
    products = jnp.einsum(
        "thd,kd->thk",
        query,
        key.keys.astype(query.dtype),  # every number of 8 bits is one of the query's dtype
        precision=product_precision(query.dtype),
        preferred_element_type=dtype,
    )
    products = products * record.softmax_scale
    products = products if key.scales is None else products * key.scales.astype(dtype)
    products = rectify(products) if record.rectify else products
    in_order = order_preserving_integers(jnp.sum(weights.astype(dtype)[..., None] * products, axis=1))
    index = start + jnp.arange(block_k, dtype=jnp.int32)
    is_selectable = (index >= starts[:, None]) & (index < ends[:, None])
    is_selectable = is_selectable if key.is_present is None else is_selectable & key.is_present
    in_order = jnp.where(is_selectable, in_order, jnp.iinfo(in_order.dtype).min)
    return jnp.max(in_order.reshape(in_order.shape[0], -1, record.block_size), axis=2)
