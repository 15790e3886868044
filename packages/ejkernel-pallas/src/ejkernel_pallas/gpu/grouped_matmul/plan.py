"""The order of matrices in the kernel of matrix gradients; tiles of rows are planned by the family (`row_tiles`)."""

import jax
import jax.numpy as jnp


def longest_first(first: jax.Array, end: jax.Array) -> jax.Array:
    """Returns first row, end and index of every matrix, ordered by decreasing number of rows: int32 [E, 3]."""
    rows, matrix = end - first, jnp.arange(first.shape[0], dtype=jnp.int32)
    # Counting replaces sorting: sums over so few elements are small kernels, but a sort is a slow kernel.
    before = (rows > rows[:, None]) | ((rows == rows[:, None]) & (matrix < matrix[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    fields = jnp.stack((first, end, matrix), axis=1)
    return jnp.sum(jnp.where((place == matrix[:, None])[..., None], fields, 0), axis=1, dtype=jnp.int32)
