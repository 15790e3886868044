"""Both passes of gather-reduce in XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.gather_reduce import GatherReduce, accumulator, named, take_rows
from ejkernel.types.pullback import Pullback

UNROLLED = 16
"""Terms up to which a sum is one expression, which XLA fuses with its gathers; more are a loop."""


def forward(record: GatherReduce, config: Any) -> tuple[jax.Array, tuple[()]]:
    """Sums of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.
    """
    dtype = accumulator(record)

    def term(n: Any) -> jax.Array:
        index, weights = _column(record.indices, n), record.weights
        return _rows(record.rows, index, None if weights is None else _column(weights, n), dtype)

    empty = jnp.zeros((record.indices.shape[0], record.rows.shape[1]), dtype)
    return _sum(term, record.indices.shape[1], empty).astype(record.rows.dtype), ()


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of the rows and of the weights.

    Args:
        pullback: Record and cotangent [T, D].
        config: Not read.

    Returns:
        `{"rows": [R, D], "weights": [T, K]}`, what is wanted of them, in the dtypes of the fields.
    """
    record, dtype = pullback.record, accumulator(pullback.record)
    gradients: dict[str, jax.Array] = {}
    if "rows" in pullback.wanted:
        gradients["rows"] = _rows_gradient(record, pullback.cotangent, dtype).astype(record.rows.dtype)
    if "weights" in pullback.wanted:
        wide = pullback.cotangent.astype(dtype)

        def dot(n: jax.Array) -> jax.Array:
            return jnp.sum(_rows(record.rows, _column(record.indices, n), None, dtype) * wide, axis=1)

        # One column at a time: all named rows together would be K times the cotangent.
        dots = lax.map(dot, jnp.arange(record.indices.shape[1], dtype=jnp.int32))
        gradients["weights"] = dots.T.astype(record.weights.dtype)
    return gradients


def _rows_gradient(record: GatherReduce, cotangent: jax.Array, dtype: Any) -> jax.Array:
    (tokens, count), weights = record.indices.shape, record.weights
    flat = None if weights is None else weights.reshape(-1)

    def term(n: Any) -> jax.Array:
        pair = _column(record.inverse, n)
        valid = named(pair, tokens * count)
        token = jnp.where(valid, pair // count, -1)
        return _rows(cotangent, token, None if flat is None else take_rows(flat, pair), dtype)

    return _sum(term, record.inverse.shape[1], jnp.zeros(record.rows.shape, dtype))


def _column(array: jax.Array, n: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(array, n, axis=1, keepdims=False)


def _rows(rows: jax.Array, index: jax.Array, weights: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the named rows times their weights; 0 for an index that names none, whatever its weight is."""
    valid = named(index, rows.shape[0])
    taken = take_rows(rows, index).astype(dtype)
    return taken if weights is None else taken * jnp.where(valid, weights.astype(dtype), 0)[:, None]


def _sum(term: Callable[[Any], jax.Array], count: int, empty: jax.Array) -> jax.Array:
    """Returns the sum of `count` terms in order; `empty` of none."""
    if not count:
        return empty
    if count > UNROLLED:
        return lax.fori_loop(1, count, lambda n, acc: acc + term(n), term(jnp.int32(0)))
    total = term(0)
    for n in range(1, count):
        total = total + term(n)
    return total
