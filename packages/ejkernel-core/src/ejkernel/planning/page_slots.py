"""Finds the tokens of requests in a cache of pages whose slots are numbered through: `page * S + slot`."""

import jax
import jax.numpy as jnp

from ejkernel.types.integers import clamp_to_int32


def slots_of_tokens(token: jax.Array, request: jax.Array, block_tables: jax.Array, pages: tuple[int, int]) -> jax.Array:
    """Returns tokens of requests as numbers of slots, int32; -1 for tokens without a slot.

    Args:
        token: int32, tokens of a request; below 0 for none.
        request: int32, the request of each token, broadcastable with it.
        block_tables: [B, N] int, the pages of each request. Entries that are no page of the cache have no tokens.
        pages: Pages, and slots S of each.
    """
    (requests, entries), (count, size) = block_tables.shape, pages
    token, request = jnp.broadcast_arrays(token, request)
    if not requests or not entries or not count:
        return jnp.full(token.shape, -1, jnp.int32)
    has_entry = (token >= 0) & (token // size < entries)
    page = clamp_to_int32(block_tables)[request, jnp.where(has_entry, token // size, 0)]
    return jnp.where(has_entry & (page >= 0) & (page < count), page * size + token % size, -1)
