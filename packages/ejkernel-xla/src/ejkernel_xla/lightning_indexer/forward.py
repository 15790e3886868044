"""Forward pass of the lightning indexer: an outer loop over tiles of queries, an inner one over tiles of keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer import LightningIndexer, TopKeyIndicesAndScores, accumulator
from ejkernel.planning.precision import product_precision
from ejkernel_xla.lightning_indexer.config import IndexerTiles, sizes
from ejkernel_xla.lightning_indexer.kernels import running_top_k
from ejkernel_xla.query_tiles import join_tiles, split_into_tiles

Row = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Queries, keys, weights, first keys and key ends of one batch row."""


def forward(record: LightningIndexer, config: IndexerTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] in the accumulator's dtype. There are no residuals.
    """
    (rows, tokens, *_), dtype = record.query.shape, accumulator(record)
    if not record.query.size or not record.key.size:  # `validate` wants heads and channels, so there are no keys
        shape = (rows, tokens, record.top_k)
        return (jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, dtype)), ()
    bounds = (jnp.broadcast_to(x, (rows, tokens)) for x in (record.key_starts, record.key_ends))
    return lax.map(lambda row: _row(row, record, config), (record.query, record.key, record.weights, *bounds)), ()


def _row(row: Row, record: LightningIndexer, config: IndexerTiles) -> TopKeyIndicesAndScores:
    """Returns the selected keys of one batch row."""
    query, key, weights, starts, ends = row
    block_q, block_k = sizes(record, config)
    keys = jnp.pad(key, ((0, cdiv(key.shape[0], block_k) * block_k - key.shape[0]), (0, 0)))
    # Queries that fill up the last tile have empty ranges of keys.
    tiles = tuple(split_into_tiles(x, block_q) for x in (query, weights, starts, ends))
    select = _select_from_all_scores if config.whole_rows else _select_by_merging
    indices, scores = lax.map(lambda tile: select(tile, keys, record, block_k), tiles)
    return join_tiles(indices, query.shape[0]), join_tiles(scores, query.shape[0])


def _select_by_merging(
    tile: tuple[Any, ...], keys: jax.Array, record: LightningIndexer, block_k: int
) -> TopKeyIndicesAndScores:
    """Returns the selected keys of a tile of queries, each tile of keys merged into the selection so far."""
    query, _, starts, ends = tile
    dtype = accumulator(record)

    def step(n: jax.Array, state: running_top_k.RunningTopK) -> running_top_k.RunningTopK:
        return running_top_k.merge(state, _ordered_scores(tile, keys, record, n * block_k, block_k), n * block_k)

    state = running_top_k.empty(query.shape[0], record.top_k, dtype)
    return running_top_k.selection(lax.fori_loop(*_key_tiles(starts, ends, keys, block_k), step, state), dtype)


def _select_from_all_scores(
    tile: tuple[Any, ...], keys: jax.Array, record: LightningIndexer, block_k: int
) -> TopKeyIndicesAndScores:
    """Returns the selected keys of a tile of queries, whose scores are all in memory, by one sort of each row."""
    query, _, starts, ends = tile
    dtype = accumulator(record)
    integers = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    not_selectable = jnp.full((query.shape[0], keys.shape[0]), jnp.iinfo(integers).min, integers)

    def step(n: jax.Array, rows: jax.Array) -> jax.Array:
        scores = _ordered_scores(tile, keys, record, n * block_k, block_k)
        return lax.dynamic_update_slice_in_dim(rows, scores, n * block_k, axis=1)

    rows = lax.fori_loop(*_key_tiles(starts, ends, keys, block_k), step, not_selectable)
    return running_top_k.selection(running_top_k.of_rows(rows, record.top_k), dtype)


def _key_tiles(starts: jax.Array, ends: jax.Array, keys: jax.Array, block_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of keys that a query of a tile may select, and the end of these tiles."""
    has_keys = starts < ends
    first = jnp.min(jnp.where(has_keys, starts, keys.shape[0])) // block_k
    return first, cdiv(jnp.max(jnp.where(has_keys, ends, 0)), block_k)


def _ordered_scores(
    tile: tuple[Any, ...], keys: jax.Array, record: LightningIndexer, start: jax.Array, block_k: int
) -> jax.Array:
    """Returns the scores [t, block_k] of the keys from `start` on as integers in the order of numbers; the least
    integer where a query may not select a key.
    """
    query, weights, starts, ends = tile
    dtype = accumulator(record)
    key = lax.dynamic_slice_in_dim(keys, start, block_k)
    products = jnp.einsum(
        "thd,kd->thk",
        query,
        key,
        precision=product_precision(query.dtype),
        preferred_element_type=dtype,
    )
    rectified = jnp.maximum(products * record.softmax_scale, 0)
    in_order = order_preserving_integers(jnp.sum(weights.astype(dtype)[..., None] * rectified, axis=1))
    index = start + jnp.arange(block_k, dtype=jnp.int32)
    is_selectable = (index >= starts[:, None]) & (index < ends[:, None])
    return jnp.where(is_selectable, in_order, jnp.iinfo(in_order.dtype).min)
