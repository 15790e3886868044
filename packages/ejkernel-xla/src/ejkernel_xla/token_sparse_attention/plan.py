"""Rows of one KV head: the arrays of a record in the order in which both passes loop over them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.token_sparse_attention import TokenSparseAttention

Arrays = tuple[jax.Array, ...]


class HeadRows(NamedTuple):
    """The arrays of one batch row and one KV head. `g` query heads share the KV head.

    Attributes:
        query: [T, g, D].
        key: [S, D].
        value: [S, Dv]; None where it is a slice of the key.
        indices: [T, K].
        extra_arrays: Arrays [T, g, ...].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    indices: jax.Array
    extra_arrays: Arrays


def for_each_head(function: Callable[[HeadRows], Any], record: TokenSparseAttention, *extra_arrays: jax.Array) -> Any:
    """Returns the results of a function of each batch row and KV head, [B, Hk, ...].

    Args:
        function: What is computed.
        record: The record.
        extra_arrays: Arrays [B, T, H, ...] that the function gets as well.
    """
    kv_heads, shared = record.key.shape[2], record.indices.shape[2] == 1

    def row(arrays: tuple[Any, ...]) -> Any:
        query, key, value, indices, extra_arrays = arrays
        by_head = (_to_head_major(query, kv_heads), key.swapaxes(0, 1), None if value is None else value.swapaxes(0, 1))
        extra_arrays = tuple(_to_head_major(x, kv_heads) for x in extra_arrays)
        lists = None if shared else indices.swapaxes(0, 1)

        def head(arrays: tuple[Any, ...]) -> Any:
            (query, key, value), listed, extra_arrays = arrays
            return function(HeadRows(query, key, value, indices[:, 0] if listed is None else listed, extra_arrays))

        return lax.map(head, (by_head, lists, extra_arrays))

    return lax.map(row, (record.query, record.key, record.value, record.indices, extra_arrays))


def _to_head_major(x: jax.Array, kv_heads: int) -> jax.Array:
    """Returns [T, H, ...] -> [Hk, T, g, ...]."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).swapaxes(0, 1)


def to_query_major(x: jax.Array) -> jax.Array:
    """Returns [B, Hk, T, g, ...] -> [B, T, H, ...]."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def finite(x: jax.Array) -> jax.Array:
    """Returns x with 0 instead of -inf, as the shift of an exponential."""
    return jnp.where(x == -jnp.inf, 0, x)
