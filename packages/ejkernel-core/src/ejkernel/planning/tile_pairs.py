"""Which pairs of a query tile and a key tile have work, for kernels that compute tiled attention tile by tile.

For every tile the extremes of its positions and segment ids decide: a pair is *empty* when no query of it can see any
key, and *full* when every query sees every key. Without explicit positions and segment ids the answers are constants.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, band


def tiles(length: int, block: int) -> int:
    """Tiles that cover a length."""
    return -(-length // block)


def padding_as_segments(record: TiledAttention) -> TiledAttention:
    """The record with masks of padding alone as segment ids, which let tiles be skipped, and no one-sided ids."""
    if record.q_segment_ids is None or record.kv_segment_ids is None:  # ids of one side restrict nothing
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


def sorted_pairs(record: TiledAttention, q_block: int, kv_block: int) -> tuple[Any, Any, Any]:
    """Which pairs of tiles have work and which are full.

    Args:
        record: As `padding_as_segments` gives it.
        q_block: Queries a tile.
        kv_block: Keys a tile.

    Returns:
        Two bool arrays [B|1, query tiles, key tiles], and the module that they are of: `numpy`, or `jax.numpy` where
        positions or segment ids are given. A tile that ends behind its array is never full.
    """
    ids = (record.q_segment_ids, record.kv_segment_ids)
    traced = record.q_positions is not None or record.kv_positions is not None or ids[0] is not None
    xp = jnp if traced else np
    queries, keys = record.query.shape[1], record.key.shape[1]
    some, every = _banded(record, q_block, kv_block, xp)
    if ids[0] is not None and ids[1] is not None:
        same, all_same = _segmented(_extremes(ids[0], queries, q_block), _extremes(ids[1], keys, kv_block))
        some, every = some & same, every & all_same
    whole_queries = np.arange(1, tiles(queries, q_block) + 1) * q_block <= queries
    whole_keys = np.arange(1, tiles(keys, kv_block) + 1) * kv_block <= keys
    whole = whole_queries[:, None] & whole_keys & (record.mask is None)
    return some, every & whole, xp


def _banded(record: TiledAttention, q_block: int, kv_block: int, xp: Any) -> tuple[Any, Any]:
    """Whether some and every pair of a tile is in the band, both [B|1, query tiles, key tiles]."""
    left, right = band(record)
    q_low, q_high = _extremes(record.q_positions, record.query.shape[1], q_block)
    k_low, k_high = _extremes(record.kv_positions, record.key.shape[1], kv_block)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = xp.ones((1, q_low.shape[1], k_low.shape[2]), bool)
    every = some
    if left is not None:
        some, every = some & (k_high >= q_low - left), every & (k_low >= q_high - left)
    if right is not None:
        some, every = some & (k_low <= q_high + right), every & (k_high <= q_low + right)
    return some, every


def _segmented(queries: tuple[Any, Any], keys: tuple[Any, Any]) -> tuple[Any, Any]:
    """Some and every pair of tiles with equal segment ids >= 0. Overlapping ranges may still have no pair."""
    (q_low, q_high), (k_low, k_high) = queries, keys
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = (jnp.maximum(q_low, k_low) <= jnp.minimum(q_high, k_high)) & (jnp.minimum(q_high, k_high) >= 0)
    every = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return some, every


def _extremes(values: jax.Array | None, length: int, block: int) -> tuple[Any, Any]:
    """Smallest and largest value of every tile, [B|1, tiles]; the indices themselves where values is None."""
    n = tiles(length, block)
    if values is None:
        index = np.minimum(np.arange(n * block, dtype=np.int32).reshape(1, n, block), length - 1)
        return index.min(axis=-1), index.max(axis=-1)
    cut = jnp.pad(values, ((0, 0), (0, n * block - length)), mode="edge").reshape(-1, n, block)
    return cut.min(axis=-1), cut.max(axis=-1)
