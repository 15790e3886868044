"""Cutting the queries of a batch row into tiles."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv


def into_tiles(x: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """Returns [T, ...] -> [tiles, block, ...], with `fill` after the last query."""
    tiles = cdiv(x.shape[0], block)
    padding = ((0, tiles * block - x.shape[0]), *((0, 0),) * (x.ndim - 1))
    return jnp.pad(x, padding, constant_values=fill).reshape(tiles, block, *x.shape[1:])


def from_tiles(x: jax.Array, length: int) -> jax.Array:
    """Returns [tiles, block, ...] -> [T, ...]."""
    return x.reshape(-1, *x.shape[2:])[:length]
