"""Which tile pairs a program visits, and which of those need no masking, as small tables that the kernels read.

For every tile the extremes of its positions and segment ids decide: a pair is *empty* when no query of it can see any
key, and *full* when every query sees every key. Without explicit positions and segment ids the tables are constants.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, band


def key_visits(record: TiledAttention, q_block: int, kv_block: int) -> Any:
    """For every query tile the key tiles to visit: int32 [B|1, query tiles, 4], as `_runs` gives them."""
    some, every, xp = _sorted(record, q_block, kv_block)
    return _runs(some, every, xp)


def query_visits(record: TiledAttention, q_block: int, kv_block: int) -> Any:
    """For every key tile the query tiles to visit: int32 [B|1, key tiles, 4]."""
    some, every, xp = _sorted(record, q_block, kv_block)
    return _runs(some.swapaxes(1, 2), every.swapaxes(1, 2), xp)


def tiles(length: int, block: int) -> int:
    """Tiles that cover a length."""
    return -(-length // block)


def _sorted(record: TiledAttention, q_block: int, kv_block: int) -> tuple[Any, Any, Any]:
    """Which tile pairs have work and which are full, [B|1, query tiles, key tiles], and the module that says so."""
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
    """Likewise for equal segment ids >= 0. Overlapping ranges of ids may still turn out to have no pair."""
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


def _runs(some: Any, every: Any, xp: Any) -> Any:
    """The span of tiles that have work, `[first, last)`, and the first run of full tiles in it, `[clear, unclear)`.

    Int32 [B|1, tiles, 4]: first, clear, unclear, last. Where nothing is full, both ends of the run are `last`.
    """
    count = some.shape[-1]
    index = np.arange(count, dtype=np.int32)
    last = xp.where(some, index + 1, 0).max(axis=-1)
    first = xp.minimum(xp.where(some, index, count).min(axis=-1), last)
    clear = xp.where(every, index, count).min(axis=-1)
    unclear = xp.where(~every & (index > clear[..., None]), index, count).min(axis=-1)
    none = clear == count
    clear, unclear = xp.where(none, last, clear), xp.where(none, last, unclear)
    return xp.stack([first, clear, unclear, last], axis=-1).astype(np.int32)
