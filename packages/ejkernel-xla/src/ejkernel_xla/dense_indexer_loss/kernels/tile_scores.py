"""The scores of a tile of queries and a tile of keys, of attention and of the indexer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.dense_indexer_loss import DenseIndexerLoss, accumulator
from ejkernel.families.lightning_indexer import rectify
from ejkernel.planning.precision import product_precision


class QueryTile(NamedTuple):
    """The arrays of some queries: [t, H, D], [t, Hi, Di], [t, Hi], [t] and [t]."""

    query: jax.Array
    query_index: jax.Array
    weights: jax.Array
    starts: jax.Array
    ends: jax.Array


class KeyRows(NamedTuple):
    """The keys of one batch row, filled up to whole tiles: [S, Hk, D] and [S, Di]."""

    key: jax.Array
    key_index: jax.Array


class TileScores(NamedTuple):
    """Scores of a tile; -inf where a query does not attend to a key.

    Attributes:
        attention_scores: [t, H, k].
        index_scores: [t, k].
        rectified: [t, Hi, k], the products of the indexer, 0 for negative ones.
        attends: [t, k].
        key_index: [k, Di], the indexer's keys of the tile.
    """

    attention_scores: jax.Array
    index_scores: jax.Array
    rectified: jax.Array
    attends: jax.Array
    key_index: jax.Array


def tile_scores(tile: QueryTile, keys: KeyRows, record: DenseIndexerLoss, start: jax.Array, block_k: int) -> TileScores:
    """Returns the scores of a tile of queries and the keys from `start` on."""
    key, key_index = (lax.dynamic_slice_in_dim(x, start, block_k) for x in keys)
    index = start + jnp.arange(block_k, dtype=jnp.int32)
    attends = (index >= tile.starts[:, None]) & (index < tile.ends[:, None])
    tokens, heads, size = tile.query.shape
    grouped = tile.query.reshape(tokens, key.shape[1], heads // key.shape[1], size)
    attention = product(record, "tgjd,kgd->tgjk", grouped, key).reshape(tokens, heads, block_k) * record.softmax_scale
    products = product(record, "tje,ke->tjk", tile.query_index, key_index) * record.index_softmax_scale
    rectified = rectify(products)
    scores = jnp.sum(tile.weights.astype(rectified.dtype)[..., None] * rectified, axis=1)
    return TileScores(
        attention_scores=jnp.where(attends[:, None], attention, -jnp.inf),
        index_scores=jnp.where(attends, scores, -jnp.inf),
        rectified=rectified,
        attends=attends,
        key_index=key_index,
    )


def mean_weights(scores: TileScores, attention_lse: jax.Array) -> jax.Array:
    """Returns attention's weights of a tile, averaged over heads, [t, k]; lse [t, H] of queries without keys is 0."""
    return jnp.mean(jnp.exp(scores.attention_scores - attention_lse[..., None]), axis=1)


def product(record: DenseIndexerLoss, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product of two tiles, accumulated and returned in the accumulator's dtype."""
    return jnp.einsum(spec, a, b, precision=product_precision(a.dtype), preferred_element_type=accumulator(record))


def key_tiles(tile: QueryTile, keys: KeyRows, block_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of keys that a query of a tile attends to, and the end of these tiles."""
    has_keys = tile.starts < tile.ends
    first = jnp.min(jnp.where(has_keys, tile.starts, keys.key.shape[0])) // block_k
    return first, -(-jnp.max(jnp.where(has_keys, tile.ends, 0)) // block_k)
