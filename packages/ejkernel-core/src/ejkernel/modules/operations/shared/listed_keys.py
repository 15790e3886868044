"""Lists of keys that a caller passes."""

import jax
import jax.numpy as jnp


def checked_indices(indices: jax.Array, keys: int) -> jax.Array:
    """Returns indices as int32, -1 for those outside of 0..keys - 1."""
    listed = indices >= 0
    if keys <= jnp.iinfo(indices.dtype).max:  # no index of this dtype is above a larger number of keys
        listed &= indices < keys
    return jnp.where(listed, indices.astype(jnp.int32), -1)
