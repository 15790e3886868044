"""The order in which a kernel visits tile pairs, as a table that its index maps and its body read.

A grid walks one list of pairs (query tile, key tile) from which empty pairs are left out, so they cost neither a step
nor a copy. Where positions or segment ids are traced, so is the length of the list: the steps that are left over repeat
the last pair, whose tiles are already there, and do nothing. Every tile that a kernel owns is visited at least once.

An entry is one int32: `query tile << 18 | key tile << 4 | flags`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel_pallas.tpu.tiled_attention.spec import Spec

WORK, MASKED, FIRST, LAST = 1, 2, 4, 8
"""Some pair attends; not every pair does; the first, and the last, visit of the tile that the kernel owns."""


def key_visits(record: TiledAttention, spec: Spec) -> Any:
    """For one query tile after another the key tiles to visit: int32 [B|1, steps]."""
    some, every, xp = _sorted(record, spec)
    return _listed(some, every, xp, by_query=True)


def query_visits(record: TiledAttention, spec: Spec) -> Any:
    """For one key tile after another the query tiles to visit: int32 [B|1, steps]."""
    some, every, xp = _sorted(record, spec)
    return _listed(some, every, xp, by_query=False)


def tile_kinds(record: TiledAttention, spec: Spec) -> Any:
    """Flags of every pair of tiles: int32 [B|1, query tiles, key tiles]."""
    some, every, _ = _sorted(record, spec)
    return (some * WORK + (some & ~every) * MASKED).astype(np.int32)


def query_tile(entry: Any) -> Any:
    """Query tile of an entry."""
    return entry >> 18


def key_tile(entry: Any) -> Any:
    """Key tile of an entry."""
    return (entry >> 4) & 0x3FFF


def tiles(length: int, block: int) -> int:
    """Tiles that cover a length."""
    return -(-length // block)


def _listed(some: Any, every: Any, xp: Any, by_query: bool) -> Any:
    """The list of visits. A tile that has no work is visited once, for its result to be written."""
    batch, q_tiles, k_tiles = some.shape
    if max(q_tiles, 2 * k_tiles) > 2**14:
        raise ValueError(f"tiles: got {q_tiles} of queries and {k_tiles} of keys, wants fewer: choose larger tiles")
    pairs = np.arange(q_tiles)[:, None] << 18 | np.arange(k_tiles) << 4
    if not by_query:
        some, every, pairs = some.swapaxes(1, 2), every.swapaxes(1, 2), pairs.T
    visited = some | ((np.arange(some.shape[2]) == 0) & ~some.any(axis=2, keepdims=True))
    count = xp.cumsum(visited, axis=2)
    first, last = visited & (count == 1), visited & (count == count[:, :, -1:])
    flags = some * WORK + (some & ~every) * MASKED + first * FIRST + last * LAST
    entries = (pairs | flags).reshape(batch, -1)
    visited = visited.reshape(batch, -1)
    order = xp.argsort(~visited, axis=1, stable=True)
    entries, total = xp.take_along_axis(entries, order, axis=1), visited.sum(axis=1, keepdims=True)
    final = xp.take_along_axis(entries, total - 1, axis=1) & ~(WORK | MASKED | FIRST | LAST)
    entries = xp.where(np.arange(entries.shape[1]) < total, entries, final)
    return (entries[:, : total.max()] if xp is np else entries).astype(np.int32)


def _sorted(record: TiledAttention, spec: Spec) -> tuple[Any, Any, Any]:
    """Which tile pairs have work and which are full, [B|1, query tiles, key tiles], and the module that says so."""
    ids = (record.q_segment_ids, record.kv_segment_ids)
    traced = record.q_positions is not None or record.kv_positions is not None or ids[0] is not None
    xp = jnp if traced else np
    some, every = _banded(record, spec, xp)
    if ids[0] is not None and ids[1] is not None:
        queries, keys = _extremes(ids[0], spec.queries, spec.q_block), _extremes(ids[1], spec.keys, spec.kv_block)
        same, all_same = _segmented(queries, keys)
        some, every = some & same, every & all_same
    whole_queries = np.arange(1, some.shape[1] + 1) * spec.q_block <= spec.queries
    whole_keys = np.arange(1, some.shape[2] + 1) * spec.kv_block <= spec.keys
    return some, every & (whole_queries[:, None] & whole_keys & (record.mask is None)), xp


def _banded(record: TiledAttention, spec: Spec, xp: Any) -> tuple[Any, Any]:
    """Whether some and every pair of a tile is in the band, both [B|1, query tiles, key tiles]."""
    q_low, q_high = _extremes(record.q_positions, spec.queries, spec.q_block)
    k_low, k_high = _extremes(record.kv_positions, spec.keys, spec.kv_block)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    left, right = band(record)
    batch = max(q_low.shape[0], k_low.shape[0]) if left is not None or right is not None else 1
    some = xp.ones((batch, q_low.shape[1], k_low.shape[2]), bool)
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
