"""The arrays that the kernel reads: tiles of queries with their lists, and finite keys with flags of others."""

import jax
import jax.numpy as jnp

from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.token_sparse_attention_union.spec import UnionSpec


def query_tiles(record: TokenSparseAttention, spec: UnionSpec) -> jax.Array:
    """Returns the rows of queries, [B, tiles, rows, lanes]: 0 for a query that lists no key, which may hold NaN, and 1
    in the lanes of the query's two terms.
    """
    (batch, tokens, heads, channels), block = record.query.shape, spec.block_q
    lists = jnp.any(record.indices[:, :, 0] >= 0, axis=2)
    query = jnp.where(lists[..., None, None], record.query, 0)
    is_term = jnp.concatenate([jnp.eye(block, dtype=query.dtype)] * 2, axis=1)
    is_term = jnp.broadcast_to(is_term[jnp.arange(tokens) % block][:, None], (batch, tokens, heads, 2 * block))
    gap = jnp.zeros((batch, tokens, heads, spec.first_term - channels), query.dtype)
    query = jnp.concatenate([query, gap, is_term], axis=3)
    missing = spec.num_query_tiles * block - tokens
    query = jnp.pad(query, ((0, 0), (0, missing), (0, spec.rows_per_query - heads), (0, 0)))
    return query.reshape(batch, spec.num_query_tiles, spec.tile_rows, spec.key_width)


def list_tiles(record: TokenSparseAttention, spec: UnionSpec) -> jax.Array:
    """Returns the lists of keys, [B, queries, entries], with -1 where there is none."""
    (_, tokens, _, listed), padded = record.indices.shape, spec.num_query_tiles * spec.block_q
    padding = ((0, 0), (0, padded - tokens), (0, spec.list_length - listed))
    return jnp.pad(record.indices[:, :, 0], padding, constant_values=-1)


def finite_keys(record: TokenSparseAttention, spec: UnionSpec) -> tuple[jax.Array, jax.Array]:
    """Returns keys [B, S, lanes] with 0 instead of numbers that are not finite, and 1 for each key that has such
    numbers, else 0: [B, tiles, keys / 128, 128] float32. A product would spread them to keys next to it.
    """
    key = record.key[:, :, 0]
    missing = spec.num_key_tiles * spec.block_kv - key.shape[1]
    is_finite = jnp.isfinite(key)
    flags = jnp.where(jnp.all(is_finite, axis=2), 0.0, 1.0).astype(jnp.float32)
    flags = jnp.pad(flags, ((0, 0), (0, missing))).reshape(key.shape[0], spec.num_key_tiles, -1, LANES)
    rows = jnp.pad(jnp.where(is_finite, key, 0), ((0, 0), (0, missing), (0, spec.key_width - key.shape[2])))
    return rows, flags
