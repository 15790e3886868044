"""The order in which a kernel visits tile pairs, as a table that its index maps and its body read.

A grid walks one list of pairs (query tile, key tile) from which empty pairs are left out, so they cost neither a step
nor a copy. Where positions or segment ids are traced, so is the length of the list: the steps that are left over repeat
the last pair, whose tiles are already there, and do nothing. Every tile that a kernel owns is visited at least once.

An entry is one int32: `query tile << 18 | key tile << 4 | flags`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.tile_pairs import sorted_pairs
from ejkernel_pallas.tpu.tiled_attention.patterns import drawn
from ejkernel_pallas.tpu.tiled_attention.spec import Spec

WORK, MASKED, FIRST, LAST = 1, 2, 4, 8
"""Some pair attends; not every pair does; the first, and the last, visit of the tile that the kernel owns."""


def key_visits(record: TiledAttention, spec: Spec) -> Any:
    """For one query tile after another the key tiles to visit: int32 [B|1, H|1, steps]."""
    return _listed(*_pairs(record, spec), by_query=True)


def query_visits(record: TiledAttention, spec: Spec) -> Any:
    """For one key tile after another the query tiles that some head of a group visits: int32 [B|1, Hk|1, steps]."""
    some, every, xp = _pairs(record, spec)
    if some.shape[1] > 1:
        groups = (some.shape[0], -1, spec.group, *some.shape[2:])
        some, every = some.reshape(groups).any(axis=2), every.reshape(groups).all(axis=2)
    return _listed(some, every, xp, by_query=False)


def tile_kinds(record: TiledAttention, spec: Spec) -> Any:
    """Flags of every pair of tiles: int32 [B|1, H|1, query tiles, key tiles]."""
    some, every, _ = _pairs(record, spec)
    return (some * WORK + (some & ~every) * MASKED).astype(np.int32)


def _pairs(record: TiledAttention, spec: Spec) -> tuple[Any, Any, Any]:
    """Which pairs of tiles have work, which are full, both [B|1, H|1, query tiles, key tiles], and of which module."""
    some, every, xp = sorted_pairs(record, spec.q_block, spec.kv_block)
    some, every, pattern = some[:, None], every[:, None], drawn(record, spec)
    if pattern is None:
        return some, every, xp
    return some & pattern.some, every & pattern.every, xp if record.dropout_origin is None else jnp


def distinct_rows(table: Any) -> tuple[bool, bool]:
    """Whether batch rows, and heads, have tile pairs of their own in a table [B|1, H|1, ...]."""
    return table.shape[0] > 1, table.shape[1] > 1


def walk(b: Any, h: Any, step: Any, *rest: Any, distinct: tuple[bool, bool], group: int = 1) -> tuple[Any, ...]:
    """Batch row, query head, query tile and key tile of a grid step.

    Args:
        b: Batch row.
        h: Query head; KV head where the grid has an axis for the heads of a group.
        step: Which tile pair.
        rest: Query head of the group, if the grid tells them apart, and the table.
        distinct: Whether batch rows, and heads, have tile pairs of their own.
        group: Query heads a KV head.
    """
    *member, table = rest
    entry = entry_at(table, distinct, b, h, step, (pl.num_programs(1), pl.num_programs(2)))
    i, j = query_tile(entry), key_tile(entry)
    return b, h * group + member[0] if member else h, i, j


def entry_at(table: Any, distinct: tuple[bool, bool], b: Any, h: Any, step: Any, sizes: tuple[Any, Any]) -> Any:
    """An entry of a table [B|1, H|1, steps] that is one vector.

    Args:
        table: The vector.
        distinct: Whether batch rows, and heads, have tile pairs of their own.
        b: Batch row.
        h: Head.
        step: Which visit.
        sizes: Heads and visits.
    """
    row = (b if distinct[0] else 0) * (sizes[0] if distinct[1] else 1) + (h if distinct[1] else 0)
    return table[row * sizes[1] + step]


def query_tile(entry: Any) -> Any:
    """Query tile of an entry."""
    return entry >> 18


def key_tile(entry: Any) -> Any:
    """Key tile of an entry."""
    return (entry >> 4) & 0x3FFF


def _listed(some: Any, every: Any, xp: Any, by_query: bool) -> Any:
    """The list of visits. A tile that has no work is visited once, for its result to be written."""
    rows, (q_tiles, k_tiles) = some.shape[:2], some.shape[2:]
    some, every = some.reshape(-1, q_tiles, k_tiles), every.reshape(-1, q_tiles, k_tiles)
    if max(q_tiles, 2 * k_tiles) > 2**14:
        raise ValueError(f"tiles: got {q_tiles} of queries and {k_tiles} of keys, wants fewer: choose larger tiles")
    pairs = np.arange(q_tiles)[:, None] << 18 | np.arange(k_tiles) << 4
    if not by_query:
        some, every, pairs = some.swapaxes(1, 2), every.swapaxes(1, 2), pairs.T
    visited = some | ((np.arange(some.shape[2]) == 0) & ~some.any(axis=2, keepdims=True))
    count = xp.cumsum(visited, axis=2)
    first, last = visited & (count == 1), visited & (count == count[:, :, -1:])
    flags = some * WORK + (some & ~every) * MASKED + first * FIRST + last * LAST
    entries = (pairs | flags).reshape(some.shape[0], -1)
    visited = visited.reshape(some.shape[0], -1)
    order = xp.argsort(~visited, axis=1, stable=True)
    entries, total = xp.take_along_axis(entries, order, axis=1), visited.sum(axis=1, keepdims=True)
    final = xp.take_along_axis(entries, total - 1, axis=1) & ~(WORK | MASKED | FIRST | LAST)
    entries = xp.where(np.arange(entries.shape[1]) < total, entries, final)
    entries = entries[:, : total.max()] if xp is np else entries
    return entries.reshape(*rows, -1).astype(np.int32)
