"""The arrays that the kernel reads: tiles of queries by KV head, finite keys and values, and which tiles meet."""

import jax
import jax.numpy as jnp

from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.token_sparse_attention.spec import TokenSparseSpec


def query_tiles(record: TokenSparseAttention, spec: TokenSparseSpec) -> jax.Array:
    """Returns the rows of queries, [B, tiles, Hk, rows, D]; 0 for a query that lists no key, which may hold NaN."""
    lists = jnp.any(record.indices >= 0, axis=3)
    query = record.query.reshape(*record.query.shape[:2], spec.kv_heads, spec.group_size, -1)
    query = jnp.where(lists[..., None, None], query, 0)
    padding = (
        (0, 0),
        (0, spec.num_query_tiles * spec.block_q - query.shape[1]),
        (0, 0),
        (0, spec.rows_per_query - spec.group_size),
        (0, spec.key_width - query.shape[4]),
    )
    query = jnp.pad(query, padding)
    query = query.reshape(query.shape[0], spec.num_query_tiles, spec.block_q, *query.shape[2:]).swapaxes(2, 3)
    return query.reshape(*query.shape[:3], spec.tile_rows, spec.key_width)


def list_tiles(record: TokenSparseAttention, spec: TokenSparseSpec) -> jax.Array:
    """Returns the lists of keys, [B, lists, queries, K], with -1 where there is none."""
    tokens, listed = record.indices.shape[1], record.indices.shape[3]
    padding = ((0, 0), (0, spec.num_query_tiles * spec.block_q - tokens), (0, 0), (0, pad_to_lanes(listed) - listed))
    return jnp.pad(record.indices, padding, constant_values=-1).swapaxes(1, 2)


def finite_rows(array: jax.Array, width: int, spec: TokenSparseSpec) -> jax.Array:
    """Returns keys or values [B, S, Hk, n] as rows [B, S, Hk width]; 0 instead of numbers that are not finite."""
    padding = ((0, 0), (0, spec.num_key_tiles * spec.block_kv - array.shape[1]), (0, 0), (0, width - array.shape[3]))
    rows = jnp.pad(jnp.where(jnp.isfinite(array), array, 0), padding)
    return rows.reshape(*rows.shape[:2], -1)


def key_terms(record: TokenSparseAttention, spec: TokenSparseSpec) -> jax.Array:
    """Returns what is added to the scores of each key, [B, Hk, tiles, keys / 128, 128]: NaN if its numbers are not
    finite, else 0. A product with a tile would spread them to queries that do not list the key.
    """
    is_finite = jnp.all(jnp.isfinite(record.key), axis=3)
    if record.value is not None:
        is_finite &= jnp.all(jnp.isfinite(record.value), axis=3)
    terms = jnp.where(is_finite, 0.0, jnp.nan).astype(jnp.float32)
    terms = jnp.pad(terms, ((0, 0), (0, spec.num_key_tiles * spec.block_kv - terms.shape[1]), (0, 0)))
    return terms.swapaxes(1, 2).reshape(*terms.shape[::2], spec.num_key_tiles, spec.block_kv // LANES, LANES)


def key_tile_bounds(
    record: TokenSparseAttention, block_q: int, block_kv: int, num_key_tiles: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of keys that a tile of queries lists, and the tile after the last one, [B tiles] int32."""
    padding = ((0, 0), (0, -record.indices.shape[1] % block_q), (0, 0), (0, 0))
    indices = jnp.pad(record.indices, padding, constant_values=-1).reshape(-1, block_q, *record.indices.shape[2:])
    last = jnp.max(indices, axis=(1, 2, 3))
    first = jnp.min(jnp.where(indices >= 0, indices, num_key_tiles * block_kv - 1), axis=(1, 2, 3))
    return first // block_kv, jnp.where(last < 0, first, last) // block_kv + 1
