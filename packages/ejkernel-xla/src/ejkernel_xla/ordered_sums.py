"""Sums over queries, added to the rows that they list in a fixed order."""

import jax
import jax.numpy as jnp
from jax import lax


def add_to_rows(sums: jax.Array, indices: jax.Array, row_terms: jax.Array) -> jax.Array:
    """Returns sums with the terms of one query after another added.

    XLA adds to equal indices in any order on a GPU. A query lists no row twice, so one query at a time has no equal
    indices.

    Args:
        sums: [S, ...].
        indices: [t, K] int32, the rows that each query lists, each once; below 0 for none.
        row_terms: [t, K, ...].
    """
    entry = jnp.arange(indices.shape[1], dtype=jnp.int32)
    # Entries of no row have indices past the last row, all of them different, and are dropped.
    rows = jnp.where(indices >= 0, indices, sums.shape[0] + entry)

    def add(query: jax.Array, sums: jax.Array) -> jax.Array:
        return sums.at[rows[query]].add(row_terms[query].astype(sums.dtype), unique_indices=True, mode="drop")

    return lax.fori_loop(0, indices.shape[0], add, sums)
