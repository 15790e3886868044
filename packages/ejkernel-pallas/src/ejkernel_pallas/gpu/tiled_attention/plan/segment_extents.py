"""Bounds of the segment ids in tiles, computed before the kernel that reads the ids.

A reduction takes a microsecond or two of a GPU, so each one computes several results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST = np.iinfo(np.int32).max
Way = tuple[Callable[..., Any], Callable[..., Any]]
MINIMUM: Way = (np.minimum.reduce, lax.min)
MAXIMUM: Way = (np.maximum.reduce, lax.max)
SUM: Way = (np.add.reduce, lax.add)
"""The reductions, for an array in NumPy and for two operands in JAX."""


class Extent(NamedTuple):
    """Bounds of the tiles of queries or keys, each [B|1, tiles].

    Attributes:
        low: Smallest segment id, without padding.
        high: Largest one; negative if there is only padding.
        padded: Whether the tile has any padding.
        breaks: How often padding ends in a tile, plus twice how often an id is less than the previous one.
        end: The end of the last element that is not padding, or 0.
    """

    low: jax.Array
    high: jax.Array
    padded: jax.Array
    breaks: jax.Array
    end: jax.Array

    @property
    def mixed(self) -> jax.Array:
        """Returns whether a row's ids are not sorted, ignoring padding before or after them, [B, 1]."""
        return self.breaks.sum(axis=1, keepdims=True) > 1


def extent(ids: jax.Array, block: int) -> Extent:
    """Returns the extent of every tile of ids [B, length], a whole number of tiles."""
    before = jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    used, index = ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32)
    breaks = jnp.where(used, jnp.where(before < 0, 1, jnp.where(ids < before, 2, 0)), 0)
    given = (jnp.where(used, ids, LARGEST), ids, ids, breaks, jnp.where(used, index + 1, 0))
    given = [jnp.broadcast_to(x, ids.shape).reshape(ids.shape[0], -1, block) for x in given]
    low, high, least, breaks, end = reduced(given, (MINIMUM, MAXIMUM, MINIMUM, SUM, MAXIMUM))
    return Extent(low, high, least < 0, breaks, end)


def reduced(arrays: list[Any], ways: tuple[Way, ...]) -> list[Any]:
    """Reduces arrays of one shape over their last axis, each in its own way; in JAX all at once."""
    if not any(isinstance(x, jax.Array) for x in arrays):
        return [numpy(x, axis=-1) for x, (numpy, _) in zip(arrays, ways, strict=True)]
    neutral = {lax.min: LARGEST, lax.max: -LARGEST, lax.add: 0}
    begin = tuple(np.int32(neutral[way]) for _, way in ways)

    def both(left: Any, right: Any) -> Any:
        return tuple(way(x, y) for (_, way), x, y in zip(ways, left, right, strict=True))

    given = tuple(jnp.asarray(x, jnp.int32) for x in arrays)
    return list(lax.reduce(given, begin, both, (given[0].ndim - 1,)))
