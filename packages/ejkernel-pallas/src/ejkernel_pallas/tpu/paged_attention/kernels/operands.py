"""Converts queries to the kernel's layout, and its results back to the callers'."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, round_to_compute_dtype
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.tpu.mosaic.paged_layout import caches_as_stored
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.plan import WorkList
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec


def pack_queries(record: PagedAttention, spec: PagedSpec, work: WorkList) -> jax.Array:
    """Returns the queries as [Hk, rows, D]: a token's query heads of one KV head are adjacent, and every sequence
    begins at a row where a copy may begin.
    """
    query = round_to_compute_dtype(record.query, record).at[work.token_at_index].get(mode="fill", fill_value=0)
    if record.latent is not None:  # the rotary part is moved to where cache rows have it
        size, start = record.latent
        query = jnp.concatenate(
            (jnp.pad(query[..., :size], ((0, 0), (0, 0), (0, start - size))), query[..., size:]), axis=-1
        )
    query = jnp.pad(query, ((0, 0), (0, spec.heads - query.shape[1]), (0, spec.head_dim - query.shape[2])))
    query = query.astype(spec.operand_dtype).reshape(-1, spec.kv_heads, spec.group_size, spec.head_dim).swapaxes(0, 1)
    return query.reshape(spec.kv_heads, -1, spec.head_dim)


def unpack_outputs(record: PagedAttention, spec: PagedSpec, work: WorkList, output: jax.Array) -> jax.Array:
    """Converts [Hk, rows, Dv] to [T, H, Dv]."""
    heads, size = record.query.shape[1], paged_cache.value_head_dim(record)
    first = 0 if record.latent else spec.value_dim - size
    tokens = output[:, :, first : first + size].reshape(spec.kv_heads, -1, spec.group_size, size)
    # Tokens are taken before heads are put next to each other: in the other order XLA takes three times as long to
    # compile.
    places = jnp.where(work.in_sequence, work.packed_index, tokens.shape[1])
    tokens = jnp.take(tokens, places, axis=1, mode="fill", fill_value=0)
    return tokens.swapaxes(0, 1).reshape(-1, spec.heads, size)[:, :heads]


def unpack_lse(record: PagedAttention, spec: PagedSpec, work: WorkList, lse: jax.Array) -> jax.Array:
    """Converts [items, Hk, 1, rows of a tile] to [T, H]."""
    tiles = lse[:, :, 0, : spec.tokens_per_tile * spec.group_size].reshape(
        -1, spec.kv_heads, spec.tokens_per_tile, spec.group_size
    )
    tokens = tiles.swapaxes(1, 2).reshape(-1, spec.tokens_per_tile, spec.heads)[work.item_of_token, work.offset_in_item]
    return jnp.where(work.in_sequence[:, None], tokens[:, : record.query.shape[1]], -jnp.inf)


def head_values_by_row(values: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns the value of each row's query head, of values [H]: float32 [Hk, rows of a tile, 128]."""
    padded = jnp.pad(values.astype(jnp.float32), (0, spec.heads - values.shape[0]))
    rows = jnp.tile(padded.reshape(spec.kv_heads, spec.group_size), (1, cdiv(spec.rows_per_tile, spec.group_size)))[
        :, : spec.rows_per_tile
    ]
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def pack_new_tokens(record: PagedAttention) -> tuple[jax.Array, ...]:
    """Returns new tokens in the layout of the caches' slots, one array per cache; heads and lanes that are padding
    are 0.
    """
    keys, values = record.new_keys, record.new_values
    if keys is None or values is None:
        return ()
    if record.kv_layout != paged_cache.COMBINED_LAYOUT:
        assert record.value_pages is not None  # the layout has separate values
        return keys.astype(record.key_pages.dtype), values.astype(record.value_pages.dtype)
    pages = record.key_pages
    rows = jnp.stack((keys, values), axis=2).astype(pages.dtype)
    padding = [(0, wants - has) for has, wants in zip(rows.shape[1:], pages.shape[2:], strict=True)]
    rows = jnp.pad(rows, ((0, 0), *padding))
    return (rows.reshape(-1, *caches_as_stored(record)[0].shape[2:]),)
