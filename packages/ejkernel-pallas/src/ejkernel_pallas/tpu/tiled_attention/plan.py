"""Converts the block map to a list of tile pairs, which index maps and kernels read from scalar memory.

    causal, 3 x 3 tiles            pairs_by_query                          pairs_by_key
    #: full  /: diagonal           one accumulator per query tile          one accumulator per key tile
    / . .
    # / .                          (0,0) | (1,0) (1,1) | (2,0) (2,1) (2,2) (0,0) (1,0) (2,0) | (1,1) (2,1) | (2,2)
    # # /                          FIRST at the start and LAST at the end of each run

The grid runs over the list. Empty pairs are not in it, so they cost neither a step nor a copy. If positions or segment
ids are traced, the number of pairs is unknown at compile time: the list then has the largest possible length, and its
remaining entries repeat the last pair, whose tiles are already in VMEM, without any work. Every accumulated tile is in
the list at least once.

`planning.block_maps` finds the pairs. Its own lists, one per tile and all as long as the longest, are not used by this
grid: each missing entry of a shorter list would cost a step.

An entry is one int32: `query tile << 18 | key tile << 4 | flags`.
"""

from typing import Any

import numpy as np
from jax.experimental import pallas as pl

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import block_map
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

HAS_WORK_FLAG, MASKED_FLAG, FIRST_PAIR_FLAG, LAST_PAIR_FLAG = 1, 2, 4, 8
"""Flags of an entry: some pair attends; some pair does not; first, and last, entry of the tile that is accumulated."""


def pairs_by_query(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns the tile pairs, ordered by query tile: int32 [B|1, H|1, steps]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    return _make_pair_table(blocks.any_allowed, blocks.all_allowed, blocks.xp, ordered_by_query=True)


def pairs_by_key(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns the tile pairs that some head of a group has, ordered by key tile: int32 [B|1, Hk|1, steps]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    some, every = blocks.any_allowed, blocks.all_allowed
    if some.shape[1] > 1:
        groups = (some.shape[0], -1, spec.group_size, *some.shape[2:])
        some, every = some.reshape(groups).any(axis=2), every.reshape(groups).all(axis=2)
    return _make_pair_table(some, every, blocks.xp, ordered_by_query=False)


def pair_flags(record: TiledAttention, spec: TiledSpec) -> Any:
    """Returns flags of every tile pair, int32 [B|1, H|1, query tiles, key tiles]."""
    blocks = block_map(record, spec.block_q, spec.block_kv)
    return (blocks.any_allowed * HAS_WORK_FLAG + (blocks.any_allowed & ~blocks.all_allowed) * MASKED_FLAG).astype(
        np.int32
    )


def has_distinct_rows_and_heads(table: Any) -> tuple[bool, bool]:
    """Returns whether batch rows, and heads, have tile pairs of their own in a table [B|1, H|1, ...]."""
    return table.shape[0] > 1, table.shape[1] > 1


def pair_coordinates(
    b: Any,
    h: Any,
    pair_index: Any,
    *group_member_and_table: Any,
    distinct_rows_and_heads: tuple[bool, bool],
    group: int = 1,
) -> tuple[Any, ...]:
    """Returns batch row, query head, query tile and key tile of a grid step.

    Args:
        b: Batch row.
        h: Query head, or KV head if the grid has an axis for the heads of a group.
        pair_index: Index of the tile pair.
        group_member_and_table: Query head of the group, if the grid has that axis, and the table.
        distinct_rows_and_heads: Whether batch rows, and heads, have tile pairs of their own.
        group: Query heads per KV head.
    """
    *member, table = group_member_and_table
    entry = read_pair_entry(table, distinct_rows_and_heads, b, h, pair_index, (pl.num_programs(1), pl.num_programs(2)))
    i, j = query_tile_of_entry(entry), key_tile_of_entry(entry)
    return b, h * group + member[0] if member else h, i, j


def read_pair_entry(
    table: Any,
    distinct_rows_and_heads: tuple[bool, bool],
    b: Any,
    h: Any,
    entry_index: Any,
    num_heads_and_entries: tuple[Any, Any],
) -> Any:
    """Returns an entry of a table [B|1, H|1, steps] that is stored as one vector.

    Args:
        table: The vector.
        distinct_rows_and_heads: Whether batch rows, and heads, have tile pairs of their own.
        b: Batch row.
        h: Head.
        entry_index: Index of the entry.
        num_heads_and_entries: The number of heads, and of entries per head.
    """
    row = (b if distinct_rows_and_heads[0] else 0) * (num_heads_and_entries[0] if distinct_rows_and_heads[1] else 1) + (
        h if distinct_rows_and_heads[1] else 0
    )
    return table[row * num_heads_and_entries[1] + entry_index]


def query_tile_of_entry(entry: Any) -> Any:
    """Returns the query tile of an entry."""
    return entry >> 18


def key_tile_of_entry(entry: Any) -> Any:
    """Returns the key tile of an entry."""
    return (entry >> 4) & 0x3FFF


def _make_pair_table(has_attending_pair: Any, is_full: Any, xp: Any, ordered_by_query: bool) -> Any:
    """Returns the list of tile pairs. A tile without any pair gets one entry, so that its result is written."""
    rows, (q_tiles, k_tiles) = has_attending_pair.shape[:2], has_attending_pair.shape[2:]
    has_attending_pair, is_full = (
        has_attending_pair.reshape(-1, q_tiles, k_tiles),
        is_full.reshape(-1, q_tiles, k_tiles),
    )
    if max(q_tiles, 2 * k_tiles) > 2**14:
        raise ValueError(f"tiles: got {q_tiles} of queries and {k_tiles} of keys, wants fewer: choose larger tiles")
    pairs = np.arange(q_tiles)[:, None] << 18 | np.arange(k_tiles) << 4
    if not ordered_by_query:
        has_attending_pair, is_full, pairs = has_attending_pair.swapaxes(1, 2), is_full.swapaxes(1, 2), pairs.T
    listed = has_attending_pair | (
        (np.arange(has_attending_pair.shape[2]) == 0) & ~has_attending_pair.any(axis=2, keepdims=True)
    )
    count = xp.cumsum(listed, axis=2)
    first, last = listed & (count == 1), listed & (count == count[:, :, -1:])
    flags = (
        has_attending_pair * HAS_WORK_FLAG
        + (has_attending_pair & ~is_full) * MASKED_FLAG
        + first * FIRST_PAIR_FLAG
        + last * LAST_PAIR_FLAG
    )
    entries = (pairs | flags).reshape(has_attending_pair.shape[0], -1)
    listed = listed.reshape(has_attending_pair.shape[0], -1)
    order = xp.argsort(~listed, axis=1, stable=True)
    entries, total = xp.take_along_axis(entries, order, axis=1), listed.sum(axis=1, keepdims=True)
    final = xp.take_along_axis(entries, total - 1, axis=1) & ~(
        HAS_WORK_FLAG | MASKED_FLAG | FIRST_PAIR_FLAG | LAST_PAIR_FLAG
    )
    entries = xp.where(np.arange(entries.shape[1]) < total, entries, final)
    entries = entries[:, : total.max()] if xp is np else entries
    return entries.reshape(*rows, -1).astype(np.int32)
