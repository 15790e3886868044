"""Bounds of the segment ids in tiles, computed before the kernel that reads the ids.

A reduction takes a microsecond or two of a GPU, so each one computes several results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_INT32 = np.iinfo(np.int32).max
Reduction = tuple[Callable[..., Any], Callable[..., Any]]
MIN_REDUCTION: Reduction = (np.minimum.reduce, lax.min)
MAX_REDUCTION: Reduction = (np.maximum.reduce, lax.max)
SUM_REDUCTION: Reduction = (np.add.reduce, lax.add)
"""The reductions, for an array in NumPy and for two operands in JAX."""


class TileIdExtents(NamedTuple):
    """Bounds of the tiles of queries or keys, each [B|1, tiles].

    Attributes:
        min_id: Smallest segment id, without padding.
        max_id: Largest one; negative if there is only padding.
        has_padding: Whether the tile has any padding.
        num_order_breaks: How often padding ends in a tile, plus twice how often an id is less than the previous one.
        padding_start: The end of the last element that is not padding, or 0.
    """

    min_id: jax.Array
    max_id: jax.Array
    has_padding: jax.Array
    num_order_breaks: jax.Array
    padding_start: jax.Array

    @property
    def is_unsorted(self) -> jax.Array:
        """Returns whether a row's ids are not sorted, ignoring padding before or after them, [B, 1]."""
        return self.num_order_breaks.sum(axis=1, keepdims=True) > 1


def find_tile_extents(ids: jax.Array, block: int) -> TileIdExtents:
    """Returns the extent of every tile of ids [B, length], a whole number of tiles."""
    previous_ids = jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_not_padding, index = ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32)
    order_breaks = jnp.where(is_not_padding, jnp.where(previous_ids < 0, 1, jnp.where(ids < previous_ids, 2, 0)), 0)
    reduced_arrays = (
        jnp.where(is_not_padding, ids, MAX_INT32),
        ids,
        ids,
        order_breaks,
        jnp.where(is_not_padding, index + 1, 0),
    )
    reduced_arrays = [jnp.broadcast_to(x, ids.shape).reshape(ids.shape[0], -1, block) for x in reduced_arrays]
    low, high, min_id, order_breaks, end = reduce_last_axis(
        reduced_arrays, (MIN_REDUCTION, MAX_REDUCTION, MIN_REDUCTION, SUM_REDUCTION, MAX_REDUCTION)
    )
    return TileIdExtents(low, high, min_id < 0, order_breaks, end)


def reduce_last_axis(arrays: list[Any], reductions: tuple[Reduction, ...]) -> list[Any]:
    """Reduces arrays of one shape over their last axis, each in its own way; in JAX all at once."""
    if not any(isinstance(x, jax.Array) for x in arrays):
        return [numpy_reduce(x, axis=-1) for x, (numpy_reduce, _) in zip(arrays, reductions, strict=True)]
    neutral_elements = {lax.min: MAX_INT32, lax.max: -MAX_INT32, lax.add: 0}
    begin = tuple(np.int32(neutral_elements[operation]) for _, operation in reductions)

    def combine(left: Any, right: Any) -> Any:
        return tuple(operation(x, y) for (_, operation), x, y in zip(reductions, left, right, strict=True))

    operands = tuple(jnp.asarray(x, jnp.int32) for x in arrays)
    return list(lax.reduce(operands, begin, combine, (operands[0].ndim - 1,)))
