"""Lists of keys that a caller passes, and the pages that hold the keys of requests."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import is_symbolic
from ejkernel.modules.operations.shared.conditions import value_range_condition
from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape
from ejkernel.ops.values import Condition
from ejkernel.planning.page_slots import slots_of_tokens
from ejkernel.types.integers import clamp_to_int32


def checked_indices(indices: jax.Array, keys: int) -> jax.Array:
    """Returns indices as int32, -1 for those outside of 0..keys - 1."""
    listed = indices >= 0
    if (
        is_symbolic(keys) or keys <= jnp.iinfo(indices.dtype).max
    ):  # no index of this dtype is above a larger number of keys
        listed &= indices < keys
    return jnp.where(listed, indices.astype(jnp.int32), -1)


def slots_of_listed_tokens(
    indices: jax.Array, block_tables: jax.Array, kv_lens: jax.Array | None, pages: tuple[int, int]
) -> jax.Array:
    """Returns tokens of requests as numbers of the slots of all pages, int32; -1 for those without.

    Args:
        indices: [B, ...] int, tokens of each request.
        block_tables: [B, N] int, the pages of each request.
        kv_lens: [B] int, tokens of each request; None for all that its pages have room for.
        pages: Pages, and slots of each.
    """
    token = checked_indices(indices, block_tables.shape[1] * pages[1])
    request = jnp.arange(block_tables.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (token.ndim - 1))
    if kv_lens is not None and kv_lens.size:
        token = jnp.where(token < clamp_to_int32(kv_lens)[request], token, -1)
    return slots_of_tokens(token, request, block_tables, pages)


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


def request_length_conditions(
    kv_lens: Any, capacity: int, wants: str = "lengths that block_tables has pages for,"
) -> Iterable[Condition]:
    """Yields the condition that requests have at most as many tokens as their pages, or rows, have room for."""
    if kv_lens is not None:
        yield from value_range_condition("kv_lens", kv_lens, 0, capacity, wants)
