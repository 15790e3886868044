"""Backward pass of token-sparse attention, by recomputation of the scores of listed keys.

The gradients are those of `ejkernel.families.token_sparse_attention`. Those of keys and values are added query by
query. A key that a query lists n times is one entry with n times the weight, so no two additions
of a step go to the same entry, and two runs give the same bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import at_most
from ejkernel.families.token_sparse_attention import (
    TokenSparseAttention,
    accumulator,
    sink_gradient,
    softmax_gradient_terms,
)
from ejkernel.types.pullback import Pullback
from ejkernel_xla.ordered_sums import add_to_rows
from ejkernel_xla.query_tiles import QueryTile, join_tiles, split_into_tiles
from ejkernel_xla.token_sparse_attention.forward import product, scores_of_listed
from ejkernel_xla.token_sparse_attention.plan import HeadRows, for_each_head, to_query_major

Arrays = tuple[jax.Array, ...]


def backward(pullback: Pullback, config: QueryTile) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output, the cotangents of output and lse, and the requested names.
        config: Queries per tile.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, terms = pullback.record, softmax_gradient_terms(pullback)
    grads: dict[str, Any] = {"softmax_aux": sink_gradient(record, terms)}
    if not math.prod((record.query.size, record.key.size, record.indices.size, record.value_size)):
        grads |= {name: jnp.zeros_like(getattr(record, name)) for name in ("query", "key")}
        grads["value"] = None if record.value is None else jnp.zeros_like(record.value)
    elif pullback.grad_fields & {"query", "key", "value"}:
        more = (pullback.cotangent, terms.delta, terms.lse)
        dquery, dkey, dvalue = for_each_head(lambda head: _head_gradients(head, record, config), record, *more)
        grads |= {"query": to_query_major(dquery), "key": dkey.swapaxes(1, 2)}
        grads["value"] = None if record.value is None else dvalue.swapaxes(1, 2)
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _head_gradients(head: HeadRows, record: TokenSparseAttention, config: QueryTile) -> Arrays:
    """Returns the gradients of one batch row and KV head: of queries, keys, and values (None of a slice of keys)."""
    block, dtype = at_most(config.block_q, head.query.shape[0]), accumulator(record)
    tiles = (
        split_into_tiles(head.query, block),
        split_into_tiles(head.indices, block, fill=-1),
        *(split_into_tiles(x, block) for x in head.extra_arrays),
    )

    def step(sums: Any, tile: Arrays) -> tuple[Any, jax.Array]:
        query, indices, *more = tile
        indices, counts = count_listed(indices)
        dquery, dkey, dvalue = _tile(query, indices, counts, (more[0], more[1], more[2]), head, record)
        if record.key_format is not None:  # keys that are bytes have no gradient
            return sums, dquery
        if record.value is None:
            missing = dkey.shape[-1] - dvalue.shape[-1]
            return (add_to_rows(sums[0], indices, dkey + jnp.pad(dvalue, ((0, 0), (0, 0), (0, missing)))), None), dquery
        return (add_to_rows(sums[0], indices, dkey), add_to_rows(sums[1], indices, dvalue)), dquery

    start = tuple(None if x is None else jnp.zeros((x.shape[1], x.shape[3]), dtype) for x in (record.key, record.value))
    (dkey, dvalue), dquery = lax.scan(step, start, tiles)
    return join_tiles(dquery, head.query.shape[0]), dkey, dvalue


def count_listed(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys of each query once, -1 in what is left, and how often the query lists them: both [t, K]."""
    ordered = jnp.sort(indices, axis=1)
    is_first = jnp.concatenate([jnp.ones_like(ordered[:, :1], bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    # The next first entry, or the end of the list, is where the run of a key ends.
    entry = lax.broadcasted_iota(jnp.int32, ordered.shape, 1)
    later = jnp.where(is_first, entry, ordered.shape[1])[:, 1:]
    ends = lax.cummin(jnp.pad(later, ((0, 0), (0, 1)), constant_values=ordered.shape[1]), axis=1, reverse=True)
    return jnp.where(is_first, ordered, -1), ends - entry


def _tile(
    query: jax.Array,
    indices: jax.Array,
    counts: jax.Array,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    head: HeadRows,
    record: TokenSparseAttention,
) -> Arrays:
    """Returns the gradients of a tile's queries, and of the keys and values that each of them lists."""
    cotangent, delta, lse = rows
    scores, key, value = scores_of_listed(query, indices, head, record)
    is_listed = (indices >= 0)[:, None]
    weights = counts[:, None].astype(lse.dtype) * jnp.exp(scores - lse[..., None])
    weights = jnp.where(is_listed, weights, 0)
    dweights = product("tgv,tkv->tgk", cotangent, value)
    dscores = weights * (dweights - delta[..., None])
    dscores = jnp.where(is_listed, dscores, 0).astype(query.dtype)
    weights = weights.astype(value.dtype)
    return (
        # The scale multiplies float32 sums: float16 scores would lose small gradients.
        product("tgk,tkd->tgd", dscores, key) * record.softmax_scale,
        product("tgk,tgd->tkd", dscores, query) * record.softmax_scale,
        product("tgk,tgv->tkv", weights, cotangent),
    )
