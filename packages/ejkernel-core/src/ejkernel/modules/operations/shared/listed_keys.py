"""Lists of keys that a caller passes."""

import jax
import jax.numpy as jnp


def checked_indices(indices: jax.Array, keys: int) -> jax.Array:
    """Returns indices as int32, -1 for those outside of 0..keys - 1."""
    # Numbers of 8 and 16 bits cannot be compared with a number of keys above theirs, and 64 bits do not fit into 32.
    wide = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    return jnp.where((wide >= 0) & (wide < keys), wide, -1).astype(jnp.int32)
