"""Forward pass of token-sparse attention: a loop over tiles of queries, each with the keys that it lists."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import at_most
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import FAMILY, TokenSparseAttention, accumulator, decode_keys
from ejkernel.planning.precision import product_precision
from ejkernel_xla.query_tiles import QueryTile, forward_in_query_tiles, join_tiles, split_into_tiles
from ejkernel_xla.token_sparse_attention.plan import HeadRows, finite, for_each_head, take_listed, to_query_major


def forward(record: TokenSparseAttention, config: QueryTile) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Queries per tile.

    Returns:
        [B, T, H, Dv] in the query's dtype, and lse [B, H, T] in the accumulator's.
    """
    if config.batch_invariant:
        return forward_in_query_tiles(forward, record, FAMILY.axes_of(record), config, (1, 2))
    (rows, tokens, heads, _), dtype = record.query.shape, accumulator(record)
    sinks = jnp.full(heads, -jnp.inf, dtype) if record.softmax_aux is None else record.softmax_aux.astype(dtype)
    if not math.prod((record.query.size, record.key.size, record.indices.size, record.value_size)):
        lse = jnp.broadcast_to(sinks[:, None], (rows, heads, tokens))
        return jnp.zeros((rows, tokens, heads, record.value_size), record.query.dtype), SoftmaxResiduals(lse=lse)
    sinks = jnp.broadcast_to(sinks, (rows, tokens, heads))
    output, lse = for_each_head(lambda head: _head(head, record, config), record, sinks)
    return to_query_major(output), SoftmaxResiduals(lse=to_query_major(lse).swapaxes(1, 2))


def _head(head: HeadRows, record: TokenSparseAttention, config: QueryTile) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, g, Dv] and lse [T, g] of one batch row and KV head."""
    block = at_most(config.block_q, head.query.shape[0])
    tiles = (
        split_into_tiles(head.query, block),
        split_into_tiles(head.indices, block, fill=-1),
        split_into_tiles(head.extra_arrays[0], block),
    )

    def tile(arrays: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        query, indices, sinks = arrays
        scores, _, value = scores_of_listed(query, indices, head, record)
        row_max = jnp.maximum(jnp.max(scores, axis=-1), sinks)
        shift = finite(row_max)
        weights = jnp.exp(scores - shift[..., None])
        total = jnp.sum(weights, axis=-1) + jnp.exp(sinks - shift)
        attends = total != 0  # also where it is NaN
        denominator = jnp.where(attends, total, 1)
        acc = product("tgk,tkv->tgv", weights.astype(value.dtype), value)
        lse = jnp.where(attends, jnp.log(denominator) + shift, -jnp.inf)
        return (acc / denominator[..., None]).astype(query.dtype), lse

    output, lse = lax.map(tile, tiles)
    return join_tiles(output, head.query.shape[0]), join_tiles(lse, head.query.shape[0])


def scores_of_listed(
    query: jax.Array, indices: jax.Array, head: HeadRows, record: TokenSparseAttention
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns scores [t, g, K], -inf where no key is listed, and the listed keys [t, K, D] and values [t, K, Dv]."""
    key = decode_keys(take_listed(record.key, head, indices), record, query.dtype)
    value = key[..., : record.value_size] if record.value is None else take_listed(record.value, head, indices)
    scores = product("tgd,tkd->tgk", query, key) * record.softmax_scale
    return jnp.where((indices >= 0)[:, None], scores, -jnp.inf), key, value


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product of two tiles, accumulated and returned in the accumulator's dtype."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, precision=product_precision(a.dtype), preferred_element_type=wide)
