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


def rows_of_pages(pages: jax.Array, block_tables: jax.Array) -> jax.Array:
    """Returns the slots of each request's pages in the order of its table, with 0 for entries that are no page.

    Args:
        pages: [P, S, ...].
        block_tables: [B, N] int.

    Returns:
        [B, N * S, ...].
    """
    (requests, entries), (count, size, *rest) = block_tables.shape, pages.shape
    if not count:
        return jnp.zeros((requests, entries * size, *rest), pages.dtype)
    table, present = clamp_to_int32(block_tables), has_page(block_tables, count)
    rows = pages[jnp.where(present, table, 0)]
    rows = jnp.where(present.reshape(requests, entries, *(1,) * (rows.ndim - 2)), rows, 0)
    return rows.reshape(requests, entries * size, *rest)


def has_page(block_tables: jax.Array, count: int) -> jax.Array:
    """Returns which entries of block tables are valid indices of `count` pages, bool in the shape of the tables."""
    table = clamp_to_int32(block_tables)
    return (table >= 0) & (table < count)
