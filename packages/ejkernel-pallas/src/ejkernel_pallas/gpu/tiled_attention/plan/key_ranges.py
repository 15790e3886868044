"""The keys that every query may attend to with segment ids, or with positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import find_tile_extents
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

UNSORTED_MARK = 2**30
"""Added to the last key of queries whose keys are not contiguous."""


def key_ranges(spec: HopperSpec, ids: tuple[jax.Array, jax.Array], block_kv: int) -> jax.Array:
    """Returns the range of keys that each query may attend to with segment ids.

    If the ids of a row's keys are sorted, with padding before or after them, the keys of a segment are contiguous, and
    every query has a first and a last key. Otherwise the range is the band's, and ids have to be compared.

    Args:
        spec: The kernel's constants.
        ids: Ids of queries [B, T] and keys [B, S], from `pad_segment_ids`.
        block_kv: Keys per tile.

    Returns:
        The first and the last key of every query, int32 [B, 2, T]. If ids have to be compared, `UNSORTED_MARK` is added
        to the last.
    """
    queries, keys = ids
    key_extents = find_tile_extents(keys, block_kv)
    is_range_end = jnp.arange(2, dtype=jnp.int32)[:, None] > 0
    ids_to_find = jnp.broadcast_to(queries[:, None], (queries.shape[0], 2, queries.shape[1]))
    found = jax.vmap(count_smaller_ids, in_axes=(0, 0, None, 0))(
        keys, ids_to_find, is_range_end, key_extents.padding_start.max(axis=1)
    )
    unsorted = key_extents.is_unsorted[:, :, None]
    # Counts of keys before the range's first key and through its last one: the last index is its count minus one.
    limit = jnp.where(unsorted, jnp.where(is_range_end, spec.kv_len, 0), found) - jnp.where(is_range_end, 1, 0)
    row = jnp.arange(queries.shape[1], dtype=jnp.int32)
    if spec.left_window is not None:
        limit = jnp.where(is_range_end, limit, jnp.maximum(limit, row - spec.left_window))
    if spec.right_window is not None:
        limit = jnp.where(is_range_end, jnp.minimum(limit, row + spec.right_window), limit)
    return jnp.where(unsorted & is_range_end, limit + UNSORTED_MARK, limit)


class PositionLimits(NamedTuple):
    """Positions as the kernel compares them.

    Attributes:
        limits: The first and the last position of the keys that each query attends to, int32 [B|1, 2, T], padded to
            whole tiles with limits between which there is none.
        key_positions: Positions of the keys, int32 [B|1, S].
    """

    limits: jax.Array
    key_positions: jax.Array


def position_limits(spec: HopperSpec, q_positions: jax.Array, kv_positions: jax.Array, block_q: int) -> PositionLimits:
    """Returns positions [B|1, T] and [B|1, S] as the kernel compares them, for tiles of `block_q` queries."""
    smallest, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    left, right = spec.left_window, spec.right_window
    low = jnp.full_like(q_positions, smallest) if left is None else q_positions - left
    high = jnp.full_like(q_positions, largest) if right is None else q_positions + right
    padding = ((0, 0), (0, -spec.q_len % block_q))
    low, high = jnp.pad(low, padding, constant_values=largest), jnp.pad(high, padding, constant_values=smallest)
    return PositionLimits(jnp.stack([low, high], axis=1), kv_positions)


def position_key_ranges(positions: PositionLimits) -> jax.Array:
    """Returns the range of keys that each query may attend to with positions.

    Keys whose positions do not decrease are in order, so that those of a query are contiguous. Otherwise the range is
    all keys, and positions have to be compared.

    Returns:
        As `key_ranges`: int32 [B|1, 2, T].
    """
    (limits, keys), kv_len = positions, positions.key_positions.shape[1]
    batch = max(limits.shape[0], keys.shape[0])
    limits, keys = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (limits, keys))
    is_range_end = jnp.arange(2, dtype=jnp.int32)[:, None] > 0
    ends = jnp.full((batch,), kv_len, jnp.int32)
    found = jax.vmap(count_smaller_ids, in_axes=(0, 0, None, 0))(keys, limits, is_range_end, ends)
    unsorted = (keys[:, 1:] < keys[:, :-1]).any(axis=1)[:, None, None]
    limit = jnp.where(unsorted, jnp.where(is_range_end, kv_len, 0), found) - jnp.where(is_range_end, 1, 0)
    return jnp.where(unsorted & is_range_end, limit + UNSORTED_MARK, limit)


def count_smaller_ids(
    ids: jax.Array, ids_to_find: jax.Array, includes_equal: jax.Array, end: jax.Array, start: jax.Array | int = 0
) -> jax.Array:
    """Returns the end of those of the ids from `start` to `end`, which are sorted, that are less than each of
    `ids_to_find`, or equal to it.

    The binary search is unrolled into a few kernels.
    """
    low, high = jnp.full_like(ids_to_find, start), jnp.broadcast_to(end, ids_to_find.shape)
    for _ in range(ids.shape[0].bit_length()):
        middle = (low + high) // 2
        # A search that has ended continues without effect, as `low < high` no longer holds.
        found = ids.at[middle].get(mode="clip")
        before = (low < high) & ((found < ids_to_find) | (includes_equal & (found == ids_to_find)))
        low, high = jnp.where(before, middle + 1, low), jnp.where(before, high, middle)
    return low
