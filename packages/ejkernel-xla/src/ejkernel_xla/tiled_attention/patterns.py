"""The key tiles a query tile visits where a pattern leaves some out: a list for every query tile.

What a pattern makes of tiles is computed on the host, once for every pattern and cutting, and lists are as long as the
longest of them. A record that is one shard of a call looks its own part up in the tables of the whole call.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.block_maps import BlockMap, block_lists, cut_pattern
from ejkernel.types.sparse_masks import Mask, MultiHeadMask
from ejkernel_xla.tiled_attention.blocks import Axis, Cursor, Plan

Carry = TypeVar("Carry")
Step = Callable[[jax.Array, Carry], Carry]


@dataclasses.dataclass(frozen=True)
class ListedVisits:
    """Key tiles to visit, listed for every query tile, the full ones first.

    Attributes:
        listed: int32 [batch chunks | 1, head chunks | 1, query tiles, longest list].
        full: int32 [batch chunks | 1, head chunks | 1, query tiles], how many of a list are full.
        count: Likewise, how many are to be visited at all.
        heads: KV heads a head chunk.
    """

    listed: Any
    full: Any
    count: Any
    heads: int

    def fold(self, at: Cursor, full: Step[Carry], masked: Step[Carry], carry: Carry) -> Carry:
        """Applies `full(tile, carry)` or `masked(tile, carry)` to every key tile that the query tile visits."""
        places = zip(self.full.shape, (at.chunk, at.head // self.heads), strict=False)
        place = (*(0 if size == 1 else index for size, index in places), at.tile)
        listed, clear, count = (jnp.asarray(table)[place] for table in (self.listed, self.full, self.count))
        if _perhaps_any(self.full):
            carry = lax.fori_loop(jnp.zeros_like(clear), clear, lambda n, carry: full(listed[n], carry), carry)
        if not _perhaps_any(self.count - self.full):
            return carry
        return lax.fori_loop(clear, count, lambda n, carry: masked(listed[n], carry), carry)


def _perhaps_any(table: Any) -> bool:
    """False where it is known at trace time that there is none: a loop that is not there need not be compiled."""
    return not isinstance(table, np.ndarray) or bool(table.any())


def list_visits(record: TiledAttention, pattern: Mask, plan: Plan, some: Any, every: Any) -> ListedVisits:
    """Lists the tiles that a pattern leaves of those that everything else leaves.

    Args:
        record: The canonical arguments.
        pattern: Its pattern.
        plan: How it is cut.
        some: Tile pairs that may have work without the pattern, bool [chunks | 1, query tiles, key tiles].
        every: Those of them that are full.
    """
    reached, filled = _own_part(record, pattern, plan)
    some, every = some[:, None] & reached, every[:, None] & filled
    reachable = some.reshape(-1, *some.shape[2:]) if isinstance(some, np.ndarray) else _reachable(pattern, plan)
    lists = block_lists(BlockMap(some=some, every=every, mask_ids=None, tile_masks=None, reachable=reachable))
    return ListedVisits(lists.blocks, lists.full, lists.count, plan.heads)


def _own_part(record: TiledAttention, pattern: Mask, plan: Plan) -> tuple[Any, Any]:
    """What the pattern makes of a record's tiles: which it reaches, which it fills; [head chunks | 1, ...]."""
    length, heads, origin = record.query.shape[1], record.query.shape[2], record.dropout_origin
    if pattern.shape[0] % length or (pattern.heads or heads) % heads:
        # Parts that no even split makes have no row in the tables; every pair of theirs is looked at.
        ones = np.ones((1, plan.queries.tiles, plan.keys.tiles), bool)
        return ones, ~ones
    tables = tile_tables(pattern, plan.queries, plan.keys, plan.heads * plan.group)
    chunks = 1 if pattern.heads is None else heads // (plan.heads * plan.group)
    some, every = (table.reshape(-1, chunks, pattern.shape[0] // length, *table.shape[2:]) for table in tables)
    if origin is None:
        return some[0, :, 0], every[0, :, 0]
    part = (0 if some.shape[0] == 1 else origin[1] // heads, slice(None), origin[2] // length)
    return jnp.asarray(some)[part], jnp.asarray(every)[part]


@functools.lru_cache(maxsize=64)
def tile_tables(pattern: Mask, queries: Axis, keys: Axis, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of a whole call, cut like one part of it, a pattern reaches and fills.

    `group` query heads share their tiles; where all heads are alike there is one group.

    Returns:
        Two bool [groups, parts, query tiles, key tiles].
    """
    some, every = cut_pattern(pattern, queries.cut, keys.cut)
    if not isinstance(pattern, MultiHeadMask):
        return some, every
    heads = np.array(pattern.which).reshape(-1, group)
    return np.any(some[heads], axis=1), np.all(every[heads], axis=1)


def _reachable(pattern: Mask, plan: Plan) -> np.ndarray:
    """What the pattern alone would leave of any part, for tables whose values are not known yet."""
    if pattern.shape[0] % plan.queries.length:
        return np.ones((1, plan.queries.tiles, plan.keys.tiles), bool)
    some, _ = tile_tables(pattern, plan.queries, plan.keys, plan.heads * plan.group)
    return some.reshape(-1, *some.shape[2:])
