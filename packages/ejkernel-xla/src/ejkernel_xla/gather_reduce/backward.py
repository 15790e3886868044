"""The gradients of gather-reduce in XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.gather_reduce import GatherReduce, accumulator, is_valid_index, take_rows
from ejkernel.types.pullback import Pullback
from ejkernel_xla.gather_reduce.kernels.row_sums import column, rows_times_weights, sum_of_terms


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
    if "rows" in pullback.grad_fields:
        gradients["rows"] = _gradient_of_rows(record, pullback.cotangent, dtype).astype(record.rows.dtype)
    if "weights" in pullback.grad_fields:
        wide = pullback.cotangent.astype(dtype)

        def dot(n: jax.Array) -> jax.Array:
            return jnp.sum(rows_times_weights(record.rows, column(record.indices, n), None, dtype) * wide, axis=1)

        # One column at a time: all named rows together would be K times the cotangent.
        dot_products = lax.map(dot, jnp.arange(record.indices.shape[1], dtype=jnp.int32))
        gradients["weights"] = dot_products.T.astype(record.weights.dtype)
    return gradients


def _gradient_of_rows(record: GatherReduce, cotangent: jax.Array, dtype: Any) -> jax.Array:
    (tokens, count), weights = record.indices.shape, record.weights
    flat = None if weights is None else weights.reshape(-1)

    def term(n: Any) -> jax.Array:
        pair = column(record.inverse, n)
        valid = is_valid_index(pair, tokens * count)
        token = jnp.where(valid, pair // count, -1)
        return rows_times_weights(cotangent, token, None if flat is None else take_rows(flat, pair), dtype)

    return sum_of_terms(term, record.inverse.shape[1], jnp.zeros(record.rows.shape, dtype))
