"""Computes the blocks that a tile loops over, and which of these blocks are full, as small tables that the kernels
read.

The minima and maxima of a tile's indices and segment ids decide: a pair of tiles is *empty* if no query of it attends
to any key, and *full* if every query attends to every key. Without segment ids the tables are constants.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import (
    MAXIMUM,
    MINIMUM,
    SUM,
    TileExtents,
    find_tile_extents,
    reduce_last_axis,
)
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

Ids = tuple[jax.Array, jax.Array] | None


def key_block_ranges(spec: HopperSpec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """Returns the range of key blocks of every query tile: int32 [B|1, query tiles, 4], as `_block_range_table`
    has them.

    A tile without work gets block 0, fully masked, so that the same code writes every output.
    """
    some, every = _classify_tile_pairs(spec, ids, q_block, kv_block)
    (first, last), full = _nonempty_block_range(some, every)
    return _block_range_table(_numpy_or_jax_where(last == 0, 0, first), _numpy_or_jax_where(last == 0, 1, last), full)


def query_block_ranges(spec: HopperSpec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """Returns the range of query blocks of every key tile: int32 [B|1, key tiles, 4].

    A later key tile neither starts nor ends before an earlier one, so that the key tiles of a query block are
    contiguous. Bands and sorted ids have this property; for unsorted ids, ranges are widened.
    """
    some, every = (pairs.swapaxes(1, 2) for pairs in _classify_tile_pairs(spec, ids, q_block, kv_block))
    return _make_monotonic(*_nonempty_block_range(some, every), some.shape[-1])


def tiles(length: int, block: int) -> int:
    """Returns the number of tiles that cover a length."""
    return cdiv(length, block)


def pad_segment_ids(values: jax.Array, block: int, padding: int) -> jax.Array:
    """Pads segment ids [B, length] to whole tiles, with one negative id for everything that attends to nothing."""
    values = jnp.where(values < 0, padding, values.astype(jnp.int32))
    return jnp.pad(values, ((0, 0), (0, -values.shape[1] % block)), constant_values=padding)


def zero_padded_tokens(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns an array [B, length, heads, size] with zeros where ids [B, length] are negative.

    Padding may hold anything, and a weight of zero times NaN is NaN.
    """
    return jnp.where((ids >= 0)[:, :, None, None], x, 0)


def _classify_tile_pairs(spec: HopperSpec, ids: Ids, q_block: int, kv_block: int) -> tuple[Any, Any]:
    """Returns whether some and every pair of two tiles attend, both [B|1, query tiles, key tiles]."""
    (q_low, q_high), (k_low, k_high) = (
        _tile_extents_of_indices(spec.queries, q_block),
        _tile_extents_of_indices(spec.keys, kv_block),
    )
    some = np.ones((1, len(q_low), len(k_low)), bool)
    every = some & (k_low + kv_block <= spec.keys)
    if spec.left is not None:
        some = some & (k_high >= q_low[:, None] - spec.left)
        every = every & (k_low >= q_high[:, None] - spec.left)
    if spec.right is not None:
        some = some & (k_low <= q_high[:, None] + spec.right)
        every = every & (k_high <= q_low[:, None] + spec.right)
    if ids is None:
        return some, every
    q, k = find_tile_extents(ids[0], q_block), find_tile_extents(ids[1], kv_block)
    q, k = TileExtents(*(x[:, :, None] for x in q)), TileExtents(*(x[:, None] for x in k))
    same = jnp.maximum(q.low, k.low) <= jnp.minimum(q.high, k.high)
    is_one_segment = (q.low == q.high) & (k.low == k.high) & (q.low == k.low) & ~(q.padded | k.padded)
    return some & same, every & is_one_segment


def _tile_extents_of_indices(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns first and last index of every tile."""
    low = np.arange(tiles(length, block)) * block
    return low, np.minimum(low + block, length) - 1


def _nonempty_block_range(some: Any, every: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the span of tiles with work, as its first tile and the one after its last, and a run of full tiles in it.

    Each is int [B|1, tiles]. For an empty span, the first is the number of tiles and the last is 0. If full tiles have
    others between them, the run is the first one.
    """
    count = some.shape[-1]
    index = np.arange(count, dtype=np.int32)
    arrays = [
        _numpy_or_jax_where(pairs, n, other) for pairs in (some, every) for n, other in ((index, count), (index + 1, 0))
    ]
    reductions = (MINIMUM, MAXIMUM, MINIMUM, MAXIMUM, SUM)
    first, last, full_start, full_end, full = reduce_last_axis([*arrays, every.astype(np.int32)], reductions)
    return (first, last), (
        full_start,
        _numpy_or_jax_where((full > 0) & (full_end - full_start != full), full_start + 1, full_end),
    )


def _block_range_table(first: Any, last: Any, full: tuple[Any, Any]) -> Any:
    """Returns int32 [B|1, tiles, 4]: first, full_start, full_end, last. Without full tiles, their run is empty and
    first.
    """
    full_start, full_end = (_numpy_or_jax_where(full[1] == 0, first, x) for x in full)
    numpy_or_jax_stack = jnp.stack if isinstance(first, jax.Array) else np.stack
    return numpy_or_jax_stack([first, full_start, full_end, last], axis=-1).astype(np.int32)


def _make_monotonic(block_range: tuple[Any, Any], full: tuple[Any, Any], count: int) -> Any:
    """Widens spans so that neither the first nor the last tile is before that of an earlier span.

    Tiles without work get the shortest such span.
    """
    tile_index = np.arange(block_range[0].shape[-1])
    is_same_or_later = tile_index >= tile_index[:, None]
    first, last = _numpy_or_jax_where(block_range[1] == 0, count - 1, block_range[0])[:, None], block_range[1][:, None]
    arrays = [_numpy_or_jax_where(is_same_or_later, first, count - 1), _numpy_or_jax_where(is_same_or_later.T, last, 0)]
    first, last = reduce_last_axis(arrays, (MINIMUM, MAXIMUM))
    return _block_range_table(first, _numpy_or_jax_where(last > first, last, first + 1), full)


def _numpy_or_jax_where(condition: Any, x: Any, y: Any) -> Any:
    """Is `where` of JAX if one of the arguments is a JAX array, and of NumPy otherwise."""
    is_jax = any(isinstance(arrays, jax.Array) for arrays in (condition, x, y))
    return (jnp if is_jax else np).where(condition, x, y)
