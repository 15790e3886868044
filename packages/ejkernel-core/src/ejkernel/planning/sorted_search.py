"""Searches sorted arrays, also those whose size is symbolic."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import is_symbolic

INT32_BITS = 32


def count_at_most(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Returns how many entries of an ascending array [N] are at most each value, int32 in the values' shape."""
    if is_symbolic(ascending.shape[0]):  # `jnp.searchsorted` wants a number
        return _count_by_halving(ascending, values)
    # Unrolled: as a loop, the search is a chain of small launches in front of a kernel of a tenth of a millisecond.
    return jnp.searchsorted(ascending, values, side="right", method="scan_unrolled").astype(jnp.int32)


def _count_by_halving(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the counts by a binary search with as many steps as the largest array needs."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_open = low < high
        counts = is_open & (ascending.at[middle].get(mode="clip") <= values)
        return jnp.where(counts, middle + 1, low), jnp.where(is_open & ~counts, middle, high)

    none = jnp.zeros(values.shape, jnp.int32)
    return lax.fori_loop(0, INT32_BITS, halve, (none, none + jnp.int32(ascending.shape[0])))[0]
