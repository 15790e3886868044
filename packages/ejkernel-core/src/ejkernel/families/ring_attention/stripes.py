"""Exchanges halves of the devices' parts, so that under a causal mask all devices have the same work.

Of P parts in order the last one sees P times as many keys as the first. Cut into 2P halves, halves i and 2P - 1 - i
together see as many as any other such pair: device i works on those two, the *striped* layout. Half h lies in part
h // 2, and every device sends its two halves to two different devices, so two permutations do it.
(Brandon et al. 2023, arXiv:2311.09431, have the idea; the pairing is that of Llama 3, arXiv:2407.21783, section 3.3.2.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DevicePairs = list[tuple[int, int]]


def stripe(x: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """Exchanges the part of the calling device along `axis` for its two halves of the striped layout, the early half
    first.
    """
    even_half, odd_half = jnp.split(x, 2, axis)
    send_pairs = _half_transfers(lax.axis_size(axis_name))
    even_half, odd_half = (
        lax.ppermute(even_half, axis_name, send_pairs[0]),
        lax.ppermute(odd_half, axis_name, send_pairs[1]),
    )
    return _order_halves(even_half, odd_half, axis, axis_name)


def unstripe(x: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """Returns the inverse of `stripe`."""
    early_half, late_half = jnp.split(x, 2, axis)
    return_pairs = [[(to, source) for source, to in pairs] for pairs in _half_transfers(lax.axis_size(axis_name))]
    swapped = _is_odd_device(axis_name)
    even_half, odd_half = jnp.where(swapped, late_half, early_half), jnp.where(swapped, early_half, late_half)
    return jnp.concatenate(
        [lax.ppermute(even_half, axis_name, return_pairs[0]), lax.ppermute(odd_half, axis_name, return_pairs[1])],
        axis=axis,
    )


def half_starts(source: Any, half_length: int, size: int) -> tuple[Any, Any]:
    """Returns where the two halves of a device begin in the whole sequence."""
    return source * half_length, (2 * size - 1 - source) * half_length


def _half_transfers(size: int) -> tuple[DevicePairs, DevicePairs]:
    """Returns (from, to) of the even halves, and of the odd ones."""

    def owner_of_half(half: int) -> int:
        return min(half, 2 * size - 1 - half)

    return [(i, owner_of_half(2 * i)) for i in range(size)], [(i, owner_of_half(2 * i + 1)) for i in range(size)]


def _order_halves(even_half: jax.Array, odd_half: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """Returns the two received halves in order. Half i comes first on device i: the even half if i is even."""
    swapped = _is_odd_device(axis_name)
    return jnp.concatenate(
        [jnp.where(swapped, odd_half, even_half), jnp.where(swapped, even_half, odd_half)], axis=axis
    )


def _is_odd_device(axis_name: str) -> jax.Array:
    return lax.axis_index(axis_name) % 2 == 1
