"""The order of matrices in the kernel of matrix gradients; tiles of rows are planned by the family (`row_tiles`)."""

import jax
import jax.numpy as jnp


def order_groups_by_size(group_starts: jax.Array, group_ends: jax.Array) -> jax.Array:
    """Returns first row, end and index of every matrix, ordered by decreasing number of rows: int32 [E, 3]."""
    rows, matrix = group_ends - group_starts, jnp.arange(group_starts.shape[0], dtype=jnp.int32)
    # Counting replaces sorting: sums over so few elements are small kernels, but a sort is a slow kernel.
    is_ordered_before = (rows > rows[:, None]) | ((rows == rows[:, None]) & (matrix < matrix[:, None]))
    position = jnp.sum(is_ordered_before, axis=1, dtype=jnp.int32)
    group_fields = jnp.stack((group_starts, group_ends, matrix), axis=1)
    return jnp.sum(jnp.where((position == matrix[:, None])[..., None], group_fields, 0), axis=1, dtype=jnp.int32)
