"""Lists of keys that a caller passes, and the pages that hold the keys of requests."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.shared.conditions import value_range_condition
from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape
from ejkernel.ops.values import Condition
from ejkernel.types.integers import clamp_to_int32


def checked_indices(indices: jax.Array, keys: int) -> jax.Array:
    """Returns indices as int32, -1 for those outside of 0..keys - 1."""
    listed = indices >= 0
    if keys <= jnp.iinfo(indices.dtype).max:  # no index of this dtype is above a larger number of keys
        listed &= indices < keys
    return jnp.where(listed, indices.astype(jnp.int32), -1)


def slots_of_tokens(
    indices: jax.Array, block_tables: jax.Array, kv_lens: jax.Array | None, pages: tuple[int, int]
) -> jax.Array:
    """Returns tokens of requests as indices of the slots of all pages, `page * S + slot`, int32; -1 for those without.

    Args:
        indices: [B, ...] int, tokens of each request.
        block_tables: [B, N] int, the pages of each request. Entries that are no page of the cache have no tokens.
        kv_lens: [B] int, tokens of each request; None for all that its pages have room for.
        pages: Pages, and slots S of each.
    """
    (requests, entries), (count, size) = block_tables.shape, pages
    token = checked_indices(indices, entries * size)
    if not requests or not entries or not count:
        return jnp.full(token.shape, -1, jnp.int32)
    request = jnp.arange(requests).reshape(-1, *(1,) * (token.ndim - 1))
    is_listed = token >= 0
    if kv_lens is not None:
        is_listed &= token < clamp_to_int32(kv_lens)[request]
    page = clamp_to_int32(block_tables)[request, jnp.maximum(token, 0) // size]
    is_listed &= (page >= 0) & (page < count)
    return jnp.where(is_listed, page * size + token % size, -1)


def check_request_pages(block_tables: Any, kv_lens: Any, pages: Any, sizes: dict[str, int]) -> None:
    """Checks the pages of requests and their lengths, where a call has them.

    Args:
        block_tables: [B, N] int, or None.
        kv_lens: [B] int, or None.
        pages: The cache, [P, S, ...].
        sizes: Known sizes, B among them.

    Raises:
        ValueError: One of them is wrong, or lengths are given without pages.
    """
    if block_tables is None:
        if kv_lens is not None:
            raise ValueError(f"kv_lens: got shape {tuple(kv_lens.shape)} with block_tables None, wants both or neither")
        return
    check_shape("block_tables", block_tables, "B N", sizes)
    check_dtype("block_tables", block_tables, jnp.integer, "an integer dtype")
    check_not_empty("key", pages, " ".join(("P", "S", *"abcdef"[: pages.ndim - 2])), "S")
    if kv_lens is not None:
        check_shape("kv_lens", kv_lens, "B", sizes)
        check_dtype("kv_lens", kv_lens, jnp.integer, "an integer dtype")


def request_length_conditions(kv_lens: Any, capacity: int) -> Iterable[Condition]:
    """Yields the condition that requests have at most as many tokens as their pages have room for."""
    if kv_lens is not None:
        yield from value_range_condition("kv_lens", kv_lens, 0, capacity, "lengths that block_tables has pages for,")
