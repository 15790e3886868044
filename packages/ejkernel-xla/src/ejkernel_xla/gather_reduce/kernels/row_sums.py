"""Sums of weighted rows, term by term."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.gather_reduce import is_valid_index, take_rows

MAX_UNROLLED_TERMS = 16
"""Terms up to which a sum is one expression, which XLA fuses with its gathers; more are a loop."""


def column(array: jax.Array, n: Any) -> jax.Array:
    """Returns column n of a matrix."""
    return lax.dynamic_index_in_dim(array, n, axis=1, keepdims=False)


def rows_times_weights(rows: jax.Array, index: jax.Array, weights: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the named rows times their weights; 0 for an index that names none, whatever its weight is."""
    valid = is_valid_index(index, rows.shape[0])
    gathered = take_rows(rows, index).astype(dtype)
    return gathered if weights is None else gathered * jnp.where(valid, weights.astype(dtype), 0)[:, None]


def sum_of_terms(term: Callable[[Any], jax.Array], count: int, value_without_terms: jax.Array) -> jax.Array:
    """Returns the sum of `count` terms in order, or `value_without_terms` if `count` is 0."""
    if not count:
        return value_without_terms
    if count > MAX_UNROLLED_TERMS:
        return lax.fori_loop(1, count, lambda n, acc: acc + term(n), term(jnp.int32(0)))
    total = term(0)
    for n in range(1, count):
        total = total + term(n)
    return total
