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
        indices: [T, K].
        extra_arrays: Arrays [T, g, ...].
        row: [] int32, the batch row.
        head: [] int32, the KV head.
    """

    query: jax.Array
    indices: jax.Array
    extra_arrays: Arrays
    row: jax.Array
    head: jax.Array


def for_each_head(function: Callable[[HeadRows], Any], record: TokenSparseAttention, *extra_arrays: jax.Array) -> Any:
    """Returns the results of a function of each batch row and KV head, [B, Hk, ...].

    Keys and values are not among what is split, as they may be a cache: the function reads them from the record.

    Args:
        function: What is computed.
        record: The record.
        extra_arrays: Arrays [B, T, H, ...] that the function gets as well.
    """
    (rows, _, kv_heads, _), shared = record.key.shape, record.indices.shape[2] == 1
    every_head = jnp.arange(kv_heads, dtype=jnp.int32)

    def row(arrays: tuple[Any, ...]) -> Any:
        index, query, indices, extra_arrays = arrays
        extra_arrays = tuple(_to_head_major(x, kv_heads) for x in extra_arrays)
        lists = None if shared else indices.swapaxes(0, 1)

        def head(arrays: tuple[Any, ...]) -> Any:
            number, query, listed, extra_arrays = arrays
            return function(HeadRows(query, indices[:, 0] if listed is None else listed, extra_arrays, index, number))

        return lax.map(head, (every_head, _to_head_major(query, kv_heads), lists, extra_arrays))

    return lax.map(row, (jnp.arange(rows, dtype=jnp.int32), record.query, record.indices, extra_arrays))


def take_listed(x: jax.Array, head: HeadRows, indices: jax.Array) -> jax.Array:
    """Returns rows of x [B, S, Hk, n] at some indices [..., K], 0 for an index below 0: [..., K, n]."""
    return jnp.where((indices >= 0)[..., None], x[head.row, jnp.maximum(indices, 0), head.head], 0)


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
