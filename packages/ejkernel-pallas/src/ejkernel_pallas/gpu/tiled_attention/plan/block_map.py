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
    MAX_REDUCTION,
    MIN_REDUCTION,
    SUM_REDUCTION,
    TileIdExtents,
    find_tile_extents,
    reduce_last_axis,
)
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

QueryAndKeySegmentIds = tuple[jax.Array, jax.Array] | None


def key_block_ranges(
    spec: HopperSpec,
    ids: QueryAndKeySegmentIds,
    block_q: int,
    block_kv: int,
    positions: tuple[jax.Array, jax.Array] | None = None,
) -> Any:
    """Returns the range of key blocks of every query tile: int32 [B|1, query tiles, 4], as `_block_range_table`
    has them.

    A tile without work gets block 0, fully masked, so that the same code writes every output. With `positions` of
    queries [B|1, T] and keys [B|1, S], the band is one of positions.
    """
    some, every = _classify_tile_pairs(spec, ids, block_q, block_kv, positions)
    (first, last), full = _nonempty_block_range(some, every)
    return _block_range_table(_numpy_or_jax_where(last == 0, 0, first), _numpy_or_jax_where(last == 0, 1, last), full)


def query_block_ranges(spec: HopperSpec, ids: QueryAndKeySegmentIds, block_q: int, block_kv: int) -> Any:
    """Returns the range of query blocks of every key tile: int32 [B|1, key tiles, 4].

    A later key tile neither starts nor ends before an earlier one, so that the key tiles of a query block are
    contiguous. Bands and sorted ids have this property; for unsorted ids, ranges are widened.
    """
    some, every = (pairs.swapaxes(1, 2) for pairs in _classify_tile_pairs(spec, ids, block_q, block_kv))
    return _make_block_ranges_monotonic(*_nonempty_block_range(some, every), some.shape[-1])


def num_tiles(num_tokens: int, block: int) -> int:
    """Returns the number of tiles that cover a length."""
    return cdiv(num_tokens, block)


def pad_segment_ids(segment_ids: jax.Array, block: int, padding_id: int) -> jax.Array:
    """Pads segment ids [B, length] to whole tiles, with one negative id for everything that attends to nothing."""
    segment_ids = jnp.where(segment_ids < 0, padding_id, segment_ids.astype(jnp.int32))
    return jnp.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % block)), constant_values=padding_id)


def zero_padded_tokens(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns an array [B, length, heads, size] with zeros where ids [B, length] are negative.

    Padding may hold anything, and a weight of zero times NaN is NaN.
    """
    return jnp.where((ids >= 0)[:, :, None, None], x, 0)


def _classify_tile_pairs(
    spec: HopperSpec,
    ids: QueryAndKeySegmentIds,
    block_q: int,
    block_kv: int,
    positions: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Any, Any]:
    """Returns whether some and every pair of two tiles attend, both [B|1, query tiles, key tiles]."""
    (q_low, q_high), (k_low, k_high) = (
        _tile_extents_of_indices(spec.q_len, block_q),
        _tile_extents_of_indices(spec.kv_len, block_kv),
    )
    some: Any = np.ones((1, len(q_low), len(k_low)), bool)
    every: Any = some & (k_low + block_kv <= spec.kv_len)
    if positions is not None:
        (q_low, q_high), (k_low, k_high) = map(_tile_extents_of_positions, positions, (block_q, block_kv))
    q_low, q_high, k_low, k_high = q_low[..., None], q_high[..., None], k_low[..., None, :], k_high[..., None, :]
    if spec.left_window is not None:
        some = some & (k_high >= q_low - spec.left_window)
        every = every & (k_low >= q_high - spec.left_window)
    if spec.right_window is not None:
        some = some & (k_low <= q_high + spec.right_window)
        every = every & (k_high <= q_low + spec.right_window)
    if ids is None:
        return some, every
    q, k = find_tile_extents(ids[0], block_q), find_tile_extents(ids[1], block_kv)
    q, k = TileIdExtents(*(x[:, :, None] for x in q)), TileIdExtents(*(x[:, None] for x in k))
    same = jnp.maximum(q.min_id, k.min_id) <= jnp.minimum(q.max_id, k.max_id)
    is_one_segment = (
        (q.min_id == q.max_id) & (k.min_id == k.max_id) & (q.min_id == k.min_id) & ~(q.has_padding | k.has_padding)
    )
    return some & same, every & is_one_segment


def _tile_extents_of_indices(num_tokens: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns first and last index of every tile."""
    low = np.arange(num_tiles(num_tokens, block)) * block
    return low, np.minimum(low + block, num_tokens) - 1


def _tile_extents_of_positions(positions: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns smallest and largest of the positions [B|1, length] of every tile."""
    padded = jnp.pad(positions, ((0, 0), (0, -positions.shape[1] % block)), mode="edge")
    tiles = padded.reshape(padded.shape[0], -1, block)
    low, high = reduce_last_axis([tiles, tiles], (MIN_REDUCTION, MAX_REDUCTION))
    return low, high


def _nonempty_block_range(any_attends: Any, all_attend: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the span of tiles with work, as its first tile and the one after its last, and a run of full tiles in it.

    Each is int [B|1, tiles]. For an empty span, the first is the number of tiles and the last is 0. If full tiles have
    others between them, the run is the first one.
    """
    count = any_attends.shape[-1]
    index = np.arange(count, dtype=np.int32)
    arrays = [
        _numpy_or_jax_where(pairs, n, other)
        for pairs in (any_attends, all_attend)
        for n, other in ((index, count), (index + 1, 0))
    ]
    reductions = (MIN_REDUCTION, MAX_REDUCTION, MIN_REDUCTION, MAX_REDUCTION, SUM_REDUCTION)
    first, last, full_start, full_end, full = reduce_last_axis([*arrays, all_attend.astype(np.int32)], reductions)
    return (first, last), (
        full_start,
        _numpy_or_jax_where((full > 0) & (full_end - full_start != full), full_start + 1, full_end),
    )


def _block_range_table(first_block: Any, end_block: Any, full_range: tuple[Any, Any]) -> Any:
    """Returns int32 [B|1, tiles, 4]: first, full_start, full_end, last. Without full tiles, their run is empty and
    first.
    """
    full_start, full_end = (_numpy_or_jax_where(full_range[1] == 0, first_block, x) for x in full_range)
    numpy_or_jax_stack = jnp.stack if isinstance(first_block, jax.Array) else np.stack
    return numpy_or_jax_stack([first_block, full_start, full_end, end_block], axis=-1).astype(np.int32)


def _make_block_ranges_monotonic(block_range: tuple[Any, Any], full_range: tuple[Any, Any], num_blocks: int) -> Any:
    """Widens spans so that neither the first nor the last tile is before that of an earlier span.

    Tiles without work get the shortest such span.
    """
    tile_index = np.arange(block_range[0].shape[-1])
    is_same_or_later = tile_index >= tile_index[:, None]
    first, last = (
        _numpy_or_jax_where(block_range[1] == 0, num_blocks - 1, block_range[0])[:, None],
        block_range[1][:, None],
    )
    arrays = [
        _numpy_or_jax_where(is_same_or_later, first, num_blocks - 1),
        _numpy_or_jax_where(is_same_or_later.T, last, 0),
    ]
    first, last = reduce_last_axis(arrays, (MIN_REDUCTION, MAX_REDUCTION))
    return _block_range_table(first, _numpy_or_jax_where(last > first, last, first + 1), full_range)


def _numpy_or_jax_where(condition: Any, x: Any, y: Any) -> Any:
    """Is `where` of JAX if one of the arguments is a JAX array, and of NumPy otherwise."""
    is_jax = any(isinstance(arrays, jax.Array) for arrays in (condition, x, y))
    return (jnp if is_jax else np).where(condition, x, y)
