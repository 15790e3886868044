"""The keys that every query may attend to with segment ids."""

import jax
import jax.numpy as jnp

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
    found = jax.vmap(_count_smaller_ids, in_axes=(0, 0, None, 0))(
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


def _count_smaller_ids(ids: jax.Array, ids_to_find: jax.Array, includes_equal: jax.Array, end: jax.Array) -> jax.Array:
    """Returns how many of the first `end` sorted ids are less than each of `ids_to_find`, or equal to it.

    The binary search is unrolled into a few kernels.
    """
    low, high = jnp.zeros_like(ids_to_find), jnp.broadcast_to(end, ids_to_find.shape)
    for _ in range(ids.shape[0].bit_length()):
        middle = (low + high) // 2
        # A search that has ended continues without effect, as `low < high` no longer holds.
        found = ids.at[middle].get(mode="clip")
        before = (low < high) & ((found < ids_to_find) | (includes_equal & (found == ids_to_find)))
        low, high = jnp.where(before, middle + 1, low), jnp.where(before, high, middle)
    return low
