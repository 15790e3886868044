"""The order in which the kernel of matrices takes them; tiles of rows are the family's (`row_tiles`)."""

import jax
import jax.numpy as jnp


def longest_first(first: jax.Array, end: jax.Array) -> jax.Array:
    """First row, the row after the last, and number of every matrix, those of the most rows first: int32 [E, 3]."""
    rows, matrix = end - first, jnp.arange(first.shape[0], dtype=jnp.int32)
    # Counting, not sorting: sums over so few are small kernels, a sort is a slow one.
    before = (rows > rows[:, None]) | ((rows == rows[:, None]) & (matrix < matrix[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    fields = jnp.stack((first, end, matrix), axis=1)
    return jnp.sum(jnp.where((place == matrix[:, None])[..., None], fields, 0), axis=1, dtype=jnp.int32)
