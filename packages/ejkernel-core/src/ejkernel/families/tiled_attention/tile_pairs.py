"""Classifies pairs of a query tile and a key tile as empty, partial or full, for kernels that compute tiled attention
tile by tile.

For every tile the extremes of its positions and segment ids decide: a pair is *empty* when no query of it can see any
key, and *full* when every query sees every key. Without explicit positions and segment ids the answers are constants.

A length that is no multiple of the tile leaves a last tile which kernels cut in one of two ways (`TileCut`):

    length 10, tiles of 4       0 1 2 3 | 4 5 6 7 | 8 9 - -     ends past its array; GPU and TPU kernels mask the rest
    moved back                  0 1 2 3 | 4 5 6 7 |
                                            6 7 8 9             ends with its array; XLA slices arrays in their layout
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention.record import TiledAttention, causal_window_bounds


def tiles(length: int, block: int) -> int:
    """Returns tiles that cover a length."""
    return cdiv(length, block)


@dataclasses.dataclass(frozen=True)
class TileCut:
    """How a sequence axis is cut into tiles.

    Attributes:
        length: Indices of the axis.
        block: Indices of a tile.
        last_tile_moved_back: Whether a last tile that would end past the axis is moved back to end with it.
    """

    length: int
    block: int
    last_tile_moved_back: bool = False

    @property
    def tiles(self) -> int:
        """Returns the number of tiles."""
        return tiles(self.length, self.block)

    @property
    def low(self) -> np.ndarray:
        """Returns first index of every tile, int32 [tiles]."""
        starts = np.arange(self.tiles, dtype=np.int32) * self.block
        return np.minimum(starts, self.length - self.block) if self.last_tile_moved_back else starts

    @property
    def high(self) -> np.ndarray:
        """Returns last index of every tile, int32 [tiles]."""
        return np.minimum(self.low + self.block, self.length) - 1

    def rows(self, values: jax.Array) -> jax.Array:
        """Returns [B, length] by tiles: [B, tiles, block]. What is after the axis repeats its last value."""
        missing = self.tiles * self.block - self.length
        if self.last_tile_moved_back and missing:
            return values[:, self.low[:, None] + np.arange(self.block, dtype=np.int32)]
        return jnp.pad(values, ((0, 0), (0, missing)), mode="edge").reshape(-1, self.tiles, self.block)


def tile_cuts(record: TiledAttention, q_block: int, kv_block: int) -> tuple[TileCut, TileCut]:
    """Returns how queries and keys are cut into tiles that may end past them."""
    return TileCut(record.query.shape[1], q_block), TileCut(record.key.shape[1], kv_block)


def padding_as_segments(record: TiledAttention) -> TiledAttention:
    """Returns the record with masks of padding alone as segment ids, which let tiles be skipped, and no
    one-sided ids.
    """
    if record.q_segment_ids is None or record.kv_segment_ids is None:  # ids of only one side restrict no pair
        record = dataclasses.replace(record, q_segment_ids=None, kv_segment_ids=None)
    mask = record.mask
    if mask is None or mask.shape[1] > 1 or min(mask.shape[2:]) > 1:
        return record
    batch, queries, keys = record.query.shape[0], record.query.shape[1], record.key.shape[1]
    q_ids = jnp.zeros((batch, queries), jnp.int32) if record.q_segment_ids is None else record.q_segment_ids
    k_ids = jnp.zeros((batch, keys), jnp.int32) if record.kv_segment_ids is None else record.kv_segment_ids
    # One of the two axes has size 1 and broadcasts over a whole row, which is then all padding or none.
    return dataclasses.replace(
        record,
        mask=None,
        q_segment_ids=jnp.where(mask[:, 0, :, 0], q_ids, -1) if mask.shape[3] == 1 else q_ids,
        kv_segment_ids=jnp.where(mask[:, 0, 0, :], k_ids, -1) if mask.shape[3] > 1 else k_ids,
    )


def classify_tile_pairs(record: TiledAttention, q_cut: TileCut, kv_cut: TileCut) -> tuple[Any, Any, Any]:
    """Returns which pairs of tiles have work and which are full.

    Args:
        record: As `padding_as_segments` gives it.
        q_cut: How queries are cut.
        kv_cut: How keys are cut.

    Returns:
        Two bool arrays [B|1, query tiles, key tiles], and the module that they are of: `numpy`, or `jax.numpy` where
        positions or segment ids are given. A tile that ends past its array is never full.
    """
    ids = (record.q_segment_ids, record.kv_segment_ids)
    traced = record.q_positions is not None or record.kv_positions is not None or ids[0] is not None
    xp = jnp if traced else np
    some, every = _tiles_within_band(record, q_cut, kv_cut, xp)
    if ids[0] is not None and ids[1] is not None:
        same, all_same = _tiles_with_equal_segments(_tile_min_and_max(ids[0], q_cut), _tile_min_and_max(ids[1], kv_cut))
        some, every = some & same, every & all_same
    whole_queries, whole_keys = (cut.high - cut.low + 1 == cut.block for cut in (q_cut, kv_cut))
    whole = whole_queries[:, None] & whole_keys & (record.mask is None)
    return some, every if whole.all() else every & whole, xp


def nonempty_and_full_tile_runs(any_allowed: Any, all_allowed: Any, xp: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the span of tiles along the last axis that have work, `[first, last)`, and the first run of full ones in
    it.

        first        full_start              full_end       last
          |  partial  |          full           |  partial   |

    Returns:
        first, full_start, full_end and last. Where nothing is full, both ends of the run are `last`.
    """
    count = any_allowed.shape[-1]
    index = np.arange(count, dtype=np.int32)
    last = xp.where(any_allowed, index + 1, 0).max(axis=-1)
    first = xp.minimum(xp.where(any_allowed, index, count).min(axis=-1), last)  # without work: an empty span
    full_start = xp.where(all_allowed, index, count).min(axis=-1)
    full_end = xp.where(~all_allowed & (index > full_start[..., None]), index, count).min(axis=-1)
    none = full_start == count
    return first, xp.where(none, last, full_start), xp.where(none, last, full_end), last


def _tiles_within_band(record: TiledAttention, q_cut: TileCut, kv_cut: TileCut, xp: Any) -> tuple[Any, Any]:
    """Returns whether some and every pair of a tile is in the band, both [B|1, query tiles, key tiles]."""
    left, right = causal_window_bounds(record)
    q_low, q_high = _tile_min_and_max(record.q_positions, q_cut)
    k_low, k_high = _tile_min_and_max(record.kv_positions, kv_cut)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = xp.ones((1, q_low.shape[1], k_low.shape[2]), bool)
    every = some
    if left is not None:
        some, every = some & (k_high >= q_low - left), every & (k_low >= q_high - left)
    if right is not None:
        some, every = some & (k_low <= q_high + right), every & (k_high <= q_low + right)
    return some, every


def _tiles_with_equal_segments(queries: tuple[Any, Any], keys: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the tiles in which some pair, and in which every pair, has equal segment ids >= 0.

    Ranges of ids that overlap need not have an id in common, so some tiles of the first kind have no such pair.
    """
    (q_low, q_high), (k_low, k_high) = queries, keys
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = (jnp.maximum(q_low, k_low) <= jnp.minimum(q_high, k_high)) & (jnp.minimum(q_high, k_high) >= 0)
    every = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return some, every


def _tile_min_and_max(values: jax.Array | None, cut: TileCut) -> tuple[Any, Any]:
    """Returns smallest and largest value of every tile, [B|1, tiles]; the indices themselves where values is None."""
    if values is None:
        return cut.low[None], cut.high[None]
    rows = cut.rows(values)
    return rows.min(axis=-1), rows.max(axis=-1)
