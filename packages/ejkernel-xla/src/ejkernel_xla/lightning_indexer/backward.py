"""Backward pass of the lightning indexer: the gradients of the selected scores, a tile of queries at a time.

The keys that a query has selected are gathered, and the gradients of `ejkernel.families.lightning_indexer` follow. The
gradients of keys are added query by query: no query selects a key twice, so no two additions of a step go to the same
entry, and two runs give the same bits.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.lightning_indexer import LightningIndexer, accumulator, take_keys
from ejkernel.planning.precision import product_precision
from ejkernel.types.pullback import Pullback
from ejkernel_xla.lightning_indexer.config import IndexerTiles, sizes
from ejkernel_xla.ordered_sums import add_to_rows
from ejkernel_xla.query_tiles import join_tiles, split_into_tiles

Arrays = tuple[jax.Array, ...]


def backward(pullback: Pullback, config: IndexerTiles) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, output, cotangents of indices (of no meaning) and scores, and the requested names.
        config: Queries per tile.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, (indices, _), (_, cotangent) = pullback.record, pullback.output, pullback.cotangent
    names = ("query", "key", "weights")
    grads: dict[str, jax.Array] = {}
    if not record.query.size or not record.key.size or not indices.size:
        grads = {name: jnp.zeros_like(getattr(record, name)) for name in names}
    else:
        rows = (record.query, record.key, record.weights, indices, cotangent)
        sums = lax.map(lambda row: _row(row, record, config), rows)
        grads = dict(zip(names, sums, strict=True))
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _row(row: Arrays, record: LightningIndexer, config: IndexerTiles) -> Arrays:
    """Returns the gradients of the queries, the keys and the weights of one batch row."""
    query, key, weights, indices, cotangent = row
    block_q, _ = sizes(record, config)
    tiles = (
        *(split_into_tiles(x, block_q) for x in (query, weights)),
        split_into_tiles(indices, block_q, fill=-1),
        split_into_tiles(cotangent, block_q),
    )

    def step(dkey: jax.Array, tile: Arrays) -> tuple[jax.Array, Arrays]:
        dquery, dselected, dweights = _tile_gradients(tile, key, record)
        return add_to_rows(dkey, tile[2], dselected), (dquery, dweights)

    dkey, (dquery, dweights) = lax.scan(step, jnp.zeros(key.shape, accumulator(record)), tiles)
    return join_tiles(dquery, query.shape[0]), dkey, join_tiles(dweights, query.shape[0])


def _tile_gradients(tile: Arrays, key: jax.Array, record: LightningIndexer) -> Arrays:
    """Returns the gradients of a tile's queries, of the keys that they have selected [t, K, D], and of the weights."""
    query, weights, indices, cotangent = tile
    dtype, precision = accumulator(record), product_precision(record.query.dtype)
    selected = take_keys(key, indices)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)

    # A query that selects nothing may hold NaN, of which its weights have no gradient.
    products = product("thd,tkd->thk", query, selected) * record.softmax_scale
    products = jnp.where(indices[:, None] >= 0, products, 0)
    dscores = jnp.where(indices >= 0, cotangent, 0).astype(dtype)[:, None]
    dweights = jnp.sum(dscores * jnp.maximum(products, 0), axis=2)
    dproducts = jnp.where(products > 0, dscores * weights.astype(dtype)[..., None] * record.softmax_scale, 0)
    dproducts = dproducts.astype(query.dtype)
    return product("thk,tkd->thd", dproducts, selected), product("thk,thd->tkd", dproducts, query), dweights
