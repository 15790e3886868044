"""The block map as a list of tile pairs, which index maps and kernels read from scalar memory.

    causal, 3 x 3 tiles            pairs_by_query                          pairs_by_key
    #: full  /: diagonal           one accumulator per query tile          one accumulator per key tile
    / . .
    # / .                          (0,0) | (1,0) (1,1) | (2,0) (2,1) (2,2) (0,0) (1,0) (2,0) | (1,1) (2,1) | (2,2)
    # # /                          FIRST at the start and LAST at the end of each run

The grid runs over the list, which has no empty pairs, so these cost neither a step nor a copy. Where positions or
segment ids are traced, the number of pairs is unknown when compiling: the list is as long as it could be, and its rest
repeats the last pair, whose tiles are in VMEM already, and does nothing. Every accumulated tile is in it at least once.

`planning.block_maps` says which pairs there are. Its lists, one for every tile and all as long as the longest, are not
what this grid runs over: they would cost a step for each entry that a shorter list lacks.

An entry is one int32: `query tile << 18 | key tile << 4 | flags`.
"""

from typing import Any

import numpy as np
from jax.experimental import pallas as pl

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import block_map
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

WORK, MASKED, FIRST, LAST = 1, 2, 4, 8
"""Flags: some pair attends; not every pair does; first, and last, entry of the tile that is accumulated."""


def pairs_by_query(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns the tile pairs, query tile by query tile: int32 [B|1, H|1, steps]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    return _pair_table(blocks.some, blocks.every, blocks.xp, by_query=True)


def pairs_by_key(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns the tile pairs that some head of a group has, key tile by key tile: int32 [B|1, Hk|1, steps]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    some, every = blocks.some, blocks.every
    if some.shape[1] > 1:
        groups = (some.shape[0], -1, spec.group_size, *some.shape[2:])
        some, every = some.reshape(groups).any(axis=2), every.reshape(groups).all(axis=2)
    return _pair_table(some, every, blocks.xp, by_query=False)


def pair_flags(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns flags of every tile pair, int32 [B|1, H|1, query tiles, key tiles]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    return (blocks.some * WORK + (blocks.some & ~blocks.every) * MASKED).astype(np.int32)


def distinct_rows(table: Any) -> tuple[bool, bool]:
    """Returns whether batch rows, and heads, have tile pairs of their own in a table [B|1, H|1, ...]."""
    return table.shape[0] > 1, table.shape[1] > 1


def pair_coordinates(
    b: Any, h: Any, step: Any, *rest: Any, distinct: tuple[bool, bool], group: int = 1
) -> tuple[Any, ...]:
    """Returns batch row, query head, query tile and key tile of a grid step.

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
    """Returns an entry of a table [B|1, H|1, steps] that is one vector.

    Args:
        table: The vector.
        distinct: Whether batch rows, and heads, have tile pairs of their own.
        b: Batch row.
        h: Head.
        step: Which entry.
        sizes: Heads, and entries of each.
    """
    row = (b if distinct[0] else 0) * (sizes[0] if distinct[1] else 1) + (h if distinct[1] else 0)
    return table[row * sizes[1] + step]


def query_tile(entry: Any) -> Any:
    """Returns query tile of an entry."""
    return entry >> 18


def key_tile(entry: Any) -> Any:
    """Returns key tile of an entry."""
    return (entry >> 4) & 0x3FFF


def _pair_table(attends: Any, full: Any, xp: Any, by_query: bool) -> Any:
    """Returns the list of tile pairs. A tile without any pair gets one entry, for its result to be written."""
    rows, (q_tiles, k_tiles) = attends.shape[:2], attends.shape[2:]
    attends, full = attends.reshape(-1, q_tiles, k_tiles), full.reshape(-1, q_tiles, k_tiles)
    if max(q_tiles, 2 * k_tiles) > 2**14:
        raise ValueError(f"tiles: got {q_tiles} of queries and {k_tiles} of keys, wants fewer: choose larger tiles")
    pairs = np.arange(q_tiles)[:, None] << 18 | np.arange(k_tiles) << 4
    if not by_query:
        attends, full, pairs = attends.swapaxes(1, 2), full.swapaxes(1, 2), pairs.T
    listed = attends | ((np.arange(attends.shape[2]) == 0) & ~attends.any(axis=2, keepdims=True))
    count = xp.cumsum(listed, axis=2)
    first, last = listed & (count == 1), listed & (count == count[:, :, -1:])
    flags = attends * WORK + (attends & ~full) * MASKED + first * FIRST + last * LAST
    entries = (pairs | flags).reshape(attends.shape[0], -1)
    listed = listed.reshape(attends.shape[0], -1)
    order = xp.argsort(~listed, axis=1, stable=True)
    entries, total = xp.take_along_axis(entries, order, axis=1), listed.sum(axis=1, keepdims=True)
    final = xp.take_along_axis(entries, total - 1, axis=1) & ~(WORK | MASKED | FIRST | LAST)
    entries = xp.where(np.arange(entries.shape[1]) < total, entries, final)
    entries = entries[:, : total.max()] if xp is np else entries
    return entries.reshape(*rows, -1).astype(np.int32)
