"""Backward pass of the dense indexer loss: tiles of scores again, with the denominators of the forward pass.

The gradients of keys are added tile of queries by tile of queries, so two runs give the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.dense_indexer_loss import DenseIndexerLoss, accumulator
from ejkernel.types.pullback import Pullback
from ejkernel_xla.dense_indexer_loss.config import LossTiles, sizes
from ejkernel_xla.dense_indexer_loss.forward import fill_tiles, finite, rows_of
from ejkernel_xla.dense_indexer_loss.kernels.tile_scores import (
    KeyRows,
    QueryTile,
    key_tiles,
    mean_weights,
    product,
    tile_scores,
)
from ejkernel_xla.float16_scales import cast_scaled
from ejkernel_xla.query_tiles import join_tiles, split_into_tiles

Arrays = tuple[jax.Array, ...]


def backward(pullback: Pullback, config: LossTiles) -> dict[str, jax.Array]:
    """Returns gradients of the requested arrays of the indexer.

    Args:
        pullback: Record, residuals, the cotangent [B, T] of the losses, and the requested names.
        config: Tile sizes.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, residuals = pullback.record, pullback.residuals
    if not record.query.size or not record.key.size:
        return {name: jnp.zeros_like(getattr(record, name)) for name in sorted(pullback.grad_fields)}
    saved = (pullback.cotangent, finite(residuals.attention_lse), finite(residuals.index_lse))
    query, key, weights = lax.map(lambda row: _row(row[0], row[1], row[2], record, config), (*rows_of(record), saved))
    grads = {"query_index": query, "key_index": key, "index_weights": weights}
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _row(queries: QueryTile, keys: KeyRows, saved: Arrays, record: DenseIndexerLoss, config: LossTiles) -> Arrays:
    """Returns the gradients of the indexer's queries, keys and weights of one batch row."""
    (tokens, _, _), (block_q, block_k) = queries.query.shape, sizes(record, config)
    count, keys = keys.key.shape[0], fill_tiles(keys, block_k)
    tiles = QueryTile(*(split_into_tiles(x, block_q) for x in queries))

    def step(dkey: jax.Array, arrays: tuple[QueryTile, Arrays]) -> tuple[jax.Array, Arrays]:
        return _tile(dkey, arrays[0], arrays[1], keys, record, block_k)

    start = jnp.zeros(keys.key_index.shape, accumulator(record))
    dkey, (dquery, dweights) = lax.scan(step, start, (tiles, tuple(split_into_tiles(x, block_q) for x in saved)))
    return join_tiles(dquery, tokens), dkey[:count], join_tiles(dweights, tokens)


def _tile(
    dkey: jax.Array, tile: QueryTile, saved: Arrays, keys: KeyRows, record: DenseIndexerLoss, block_k: int
) -> tuple[jax.Array, Arrays]:
    """Returns the gradients of the keys with those of a tile of queries added, and of its queries and weights."""
    cotangent, attention_lse, index_lse = saved
    dtype, scale = accumulator(record), record.index_softmax_scale
    query = _finite_or_zero(tile.query_index)

    def add_keys(n: jax.Array, sums: Any) -> Any:
        dkey, dquery, dweights = sums
        scores = tile_scores(tile, keys, record, n * block_k, block_k)
        share = jnp.exp(scores.index_scores - index_lse[:, None])
        dscores = cotangent[:, None] * (share - mean_weights(scores, attention_lse))
        dscores = jnp.where(scores.attends, dscores, 0)[:, None]
        dweights += jnp.sum(jnp.where(scores.attends[:, None], dscores * scores.rectified, 0), axis=2)
        dproducts = jnp.where(scores.rectified != 0, dscores * tile.weights.astype(dtype)[..., None], 0)
        dproducts = jnp.where(scores.attends[:, None], dproducts, 0)
        of_queries, query_scale = cast_scaled(dproducts, query.dtype, (1, 2))
        dquery += product(record, "tjk,ke->tje", of_queries, _finite_or_zero(scores.key_index)) * query_scale * scale
        of_keys, key_scale = cast_scaled(dproducts, query.dtype, (0, 1))
        rows = lax.dynamic_slice_in_dim(dkey, n * block_k, block_k)
        rows += product(record, "tjk,tje->ke", of_keys, query) * jnp.reshape(key_scale, (-1, 1)) * scale
        return lax.dynamic_update_slice_in_dim(dkey, rows, n * block_k, axis=0), dquery, dweights

    zeros = (jnp.zeros(x.shape, dtype) for x in (tile.query_index, tile.weights))
    dkey, dquery, dweights = lax.fori_loop(*key_tiles(tile, keys, block_k), add_keys, (dkey, *zeros))
    return dkey, (dquery, dweights)


def _finite_or_zero(x: jax.Array) -> jax.Array:
    """Returns x with 0 for NaN and infinities: a weight of 0 times NaN of padding or another sequence would be NaN.

    A query that attends to such a key has NaN in its scores' gradients already.
    """
    return jnp.where(jnp.isfinite(x), x, 0)
