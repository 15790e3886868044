"""Backward pass of the lightning indexer: the gradients of the selected scores, a tile of queries at a time.

The keys that a query has selected are gathered, and the gradients of `ejkernel.families.lightning_indexer` follow. The
gradients of keys are added query by query: no query selects a key twice, so no two additions of a step go to the same
entry, and two runs give the same bits. The keys of selected blocks are scored again, for the largest of each block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer import LightningIndexer, accumulator, rectify, take_keys, with_wide_query
from ejkernel.planning.page_slots import slots_of_tokens
from ejkernel.planning.precision import product_precision
from ejkernel.types.pullback import Pullback
from ejkernel_xla.float16_scales import cast_scaled
from ejkernel_xla.lightning_indexer.config import IndexerTiles, sizes
from ejkernel_xla.lightning_indexer.plan import take_scales
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
    fields = {name: getattr(pullback.record, name) for name in pullback.grad_fields}
    record, (indices, _), (_, cotangent) = with_wide_query(pullback.record), pullback.output, pullback.cotangent
    names = ("query", "key", "weights")
    if not record.query.size or not record.key.size or not indices.size:
        return {name: jnp.zeros_like(fields[name]) for name in sorted(fields)}
    bounds = (jnp.broadcast_to(x, indices.shape[:2]) for x in (record.key_starts, record.key_ends))
    requests = jnp.broadcast_to(jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None], indices.shape[:2])
    queries = (record.query, record.weights, indices, cotangent, requests, *bounds)
    scales = record.key_scales
    if record.block_tables is None:
        sums = lax.map(lambda row: _row(row[:-2], row[-2], row[-1], record, config), (*queries, record.key, scales))
    else:  # all requests are one row, whose keys are the slots of all pages
        queries = tuple(x.reshape(-1, *x.shape[2:]) for x in queries)
        slots = record.key.reshape(-1, record.key.shape[2])
        sums = _row(queries, slots, None if scales is None else scales.reshape(-1), record, config)
    grads: dict[str, jax.Array | None] = dict(zip(names, sums, strict=True))
    return {name: _shaped_as(fields[name], grads[name]) for name in sorted(fields)}


def _shaped_as(field: jax.Array, gradient: jax.Array | None) -> jax.Array:
    """Returns a gradient in its field's shape and dtype; 0 for keys of 8 bits, which have none."""
    if gradient is None:
        return jnp.zeros_like(field)
    return gradient.reshape(field.shape).astype(field.dtype)


def _row(
    queries: Arrays, key: jax.Array, scales: jax.Array | None, record: LightningIndexer, config: IndexerTiles
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns the gradients of the queries, the keys (None for keys of 8 bits) and the weights of one batch row."""
    tokens = queries[0].shape[0]
    block_q, _ = sizes(record, config)
    fills = (0, 0, -1, 0, 0, 0, 0)  # of queries, weights, indices, cotangents, requests, first keys and key ends
    tiles = tuple(split_into_tiles(x, block_q, fill) for x, fill in zip(queries, fills, strict=True))
    has_gradient = key.dtype.itemsize > 1

    def step(dkey: jax.Array | None, tile: Arrays) -> tuple[jax.Array | None, Arrays]:
        dquery, dselected, dweights, selected = _tile_gradients(tile, key, scales, record)
        return None if dkey is None else add_to_rows(dkey, selected, dselected), (dquery, dweights)

    start = jnp.zeros(key.shape, accumulator(record)) if has_gradient else None
    dkey, (dquery, dweights) = lax.scan(step, start, tiles)
    return join_tiles(dquery, tokens), dkey, join_tiles(dweights, tokens)


def _tile_gradients(tile: Arrays, key: jax.Array, scales: jax.Array | None, record: LightningIndexer) -> Arrays:
    """Returns the gradients of a tile's queries, of the keys that they have selected [t, K, D], of the weights, and the
    rows of these keys [t, K].
    """
    query, weights, indices, cotangent, requests, starts, ends = tile
    dtype, precision = accumulator(record), product_precision(record.query.dtype)
    rows = _rows_of_selected(indices, requests, (starts, ends), record)
    if record.block_size > 1:
        rows = _largest_of_each_block(tile, rows, key, scales, record)
    selected = take_keys(key, rows).astype(query.dtype)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)

    # A query that selects nothing may hold NaN, of which its weights have no gradient.
    products = _scaled(product("thd,tkd->thk", query, selected), scales, rows, record)
    products = jnp.where(rows[:, None] >= 0, products, 0)
    dscores = jnp.where(rows >= 0, cotangent, 0).astype(dtype)[:, None]
    dweights = jnp.sum(dscores * (rectify(products) if record.rectify else products), axis=2)
    has_gradient = rows[:, None] >= 0
    if record.rectify:  # NaN has a gradient
        has_gradient &= ~(products <= 0)
    dproducts = _scaled(dscores * weights.astype(dtype)[..., None], scales, rows, record)
    dproducts, scale = cast_scaled(jnp.where(has_gradient, dproducts, 0), query.dtype, (1, 2))
    dquery = product("thk,tkd->thd", dproducts, selected) * scale
    return dquery, product("thk,thd->tkd", dproducts, query) * scale, dweights, rows


def _rows_of_selected(indices: jax.Array, requests: jax.Array, bounds: Arrays, record: LightningIndexer) -> jax.Array:
    """Returns the rows of the selected keys among those of the call, [t, K], or of the keys of the selected blocks that
    a query may select, [t, K block_size]; -1 for none.
    """
    size = record.block_size
    keys = jnp.where(indices[..., None] >= 0, indices[..., None] * size + jnp.arange(size, dtype=jnp.int32), -1)
    keys = keys.reshape(indices.shape[0], -1)
    keys = jnp.where((keys >= bounds[0][:, None]) & (keys < bounds[1][:, None]), keys, -1)
    if record.block_tables is None:
        return jnp.where(keys < record.key.shape[1], keys, -1)
    pages, slots, _ = record.key.shape
    return slots_of_tokens(keys, requests[:, None], record.block_tables, (pages, slots))


def _largest_of_each_block(
    tile: Arrays, rows: jax.Array, key: jax.Array, scales: jax.Array | None, record: LightningIndexer
) -> jax.Array:
    """Returns the row of the key with the largest score in each selected block, [t, K]."""
    query, weights, dtype = tile[0], tile[1], accumulator(record)
    products = jnp.einsum(
        "thd,tkd->thk",
        query,
        take_keys(key, rows).astype(query.dtype),
        precision=product_precision(query.dtype),
        preferred_element_type=dtype,
    )
    products = _scaled(products, scales, rows, record)
    products = rectify(products) if record.rectify else products
    in_order = order_preserving_integers(jnp.sum(weights.astype(dtype)[..., None] * products, axis=1))
    blocks = (rows.shape[0], -1, record.block_size)
    in_order = jnp.where(rows >= 0, in_order, jnp.iinfo(in_order.dtype).min).reshape(blocks)
    largest = jnp.argmax(in_order, axis=2, keepdims=True)
    return jnp.take_along_axis(rows.reshape(blocks), largest, axis=2)[..., 0]


def _scaled(products: jax.Array, scales: jax.Array | None, rows: jax.Array, record: LightningIndexer) -> jax.Array:
    """Returns numbers [t, H, K] times the factors on the products with the keys in some rows [t, K].

    The order is that of the forward pass, as another one rounds otherwise, and another key of a block may be largest.
    """
    taken, products = take_scales(scales, rows), products * record.softmax_scale
    return products if taken is None else products * taken[:, None].astype(products.dtype)
