"""Defines the argument record of gather and reduce, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments


@arguments
class GatherReduce:
    """Canonical input of one gather-reduce. R rows of D channels, T tokens that name K rows each.

    Attributes:
        rows: [R, D] floating.
        indices: [T, K] int32, the rows that a token names; outside of 0..R-1 for none.
        inverse: [R, M] int32, the pairs that name a row, `t * K + n`; outside of 0..T*K-1 for none.
        weights: [T, K] floating; None for ones.
    """

    rows: jax.Array
    indices: jax.Array
    inverse: jax.Array
    weights: jax.Array | None = None


def accumulator(record: GatherReduce) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64 rows."""
    return jnp.promote_types(record.rows.dtype, jnp.float32)


def is_valid_index(index: jax.Array, count: int) -> jax.Array:
    """Returns a mask of the indices that name one of `count` rows or pairs."""
    return (index >= 0) & (index < count)


def take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows by their index, 0 for an index that names none; there may be none at all."""
    valid = is_valid_index(index, rows.shape[0])
    if not rows.shape[0]:
        return jnp.zeros((*index.shape, *rows.shape[1:]), rows.dtype)
    gathered = rows[jnp.where(valid, index, 0)]
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (rows.ndim - 1)), gathered, 0)
