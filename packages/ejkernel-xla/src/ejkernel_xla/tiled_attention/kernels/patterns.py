"""The key tiles of a query tile under a sparse pattern or a `mask_mod`: a list for every query tile.

    query tile 0    [ full, full, partial | . . ]          lists have the length of the longest; full tiles come first
    query tile 1    [ full, partial, partial, partial | . ]

The block map of a pattern is computed on the host, once for every pattern and cutting; that of a `mask_mod` may depend
on traced arrays. A record that is one shard of a
call looks up its shard in the tables of the whole call.
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
from ejkernel.families.tiled_attention.block_maps import BlockMap, block_lists, classify_pattern_tiles
from ejkernel.types.sparse_masks import Mask, MultiHeadMask
from ejkernel_xla.tiled_attention.kernels.pair_functions import tiles_of_mask
from ejkernel_xla.tiled_attention.plan import OuterStep, TiledAxis, TilePlan

Carry = TypeVar("Carry")
Step = Callable[[jax.Array, Carry], Carry]


@dataclasses.dataclass(frozen=True)
class KeyTileLists:
    """The key tiles that are not empty, listed for every query tile, the full ones first.

    Attributes:
        listed: int32 [batch chunks | 1, head chunks | 1, query tiles, longest list].
        full: int32 [batch chunks | 1, head chunks | 1, query tiles], how many of a list are full.
        count: int32 [batch chunks | 1, head chunks | 1, query tiles], how many of a list are full or partial.
        heads: KV heads per head chunk.
    """

    listed: Any
    full: Any
    count: Any
    heads: int

    def fold_key_tiles(self, at: OuterStep, full_step: Step[Carry], partial_step: Step[Carry], carry: Carry) -> Carry:
        """Applies `full(tile, carry)` or `partial(tile, carry)` to the full and partial key tiles of a query tile."""
        indices = zip(self.full.shape, (at.chunk, at.head // self.heads), strict=False)
        index = (*(0 if size == 1 else index for size, index in indices), at.tile)
        listed, full_count, count = (jnp.asarray(table)[index] for table in (self.listed, self.full, self.count))
        # Counts are values, not shapes: a loop ends where its list does, and filling up a list costs no step.
        if _may_have_tiles(self.full):
            carry = lax.fori_loop(
                jnp.zeros_like(full_count), full_count, lambda n, carry: full_step(listed[n], carry), carry
            )
        if not _may_have_tiles(self.count - self.full):
            return carry
        return lax.fori_loop(full_count, count, lambda n, carry: partial_step(listed[n], carry), carry)


def _may_have_tiles(table: Any) -> bool:
    """Returns False if it is known at trace time that there is none, so that no loop is compiled for it."""
    return not isinstance(table, np.ndarray) or bool(table.any())


def list_key_tiles(record: TiledAttention, plan: TilePlan, any_allowed: Any, all_allowed: Any) -> KeyTileLists:
    """Lists the key tiles in which a pair attends by pattern and `mask_mod`, among the tiles in `any_allowed`.

    Args:
        record: The canonical arguments.
        plan: How it is cut.
        any_allowed: Tile pairs that may have work without the two, bool [chunks | 1, query tiles, key tiles].
        all_allowed: Those of them that are full.
    """
    any_allowed, all_allowed = any_allowed[:, None], all_allowed[:, None]
    mask_tiles = None
    if record.pattern is not None:
        reached, filled = _pattern_tiles(record, record.pattern, plan)
        any_allowed, all_allowed = any_allowed & reached, all_allowed & filled
    if record.mask_mod is not None:
        mask_tiles, filled = tiles_of_mask(record, record.mask_mod, plan)
        any_allowed, all_allowed = any_allowed & mask_tiles, all_allowed & filled
    reachable = (
        any_allowed.reshape(-1, *any_allowed.shape[2:])
        if isinstance(any_allowed, np.ndarray)
        else _reachable(record.pattern, plan) & _any_chunk(mask_tiles)
    )
    lists = block_lists(
        BlockMap(any_allowed=any_allowed, all_allowed=all_allowed, mask_ids=None, tile_masks=None, reachable=reachable)
    )
    return KeyTileLists(lists.blocks, lists.full, lists.count, plan.heads)


def _pattern_tiles(record: TiledAttention, pattern: Mask, plan: TilePlan) -> tuple[Any, Any]:
    """Returns the pattern's block map of a record: tiles that are not empty, tiles that are full; [head chunks | 1,
    ...].
    """
    length, heads, origin = record.query.shape[1], record.query.shape[2], record.dropout_origin
    if pattern.shape[0] % length or (pattern.heads or heads) % heads:
        # Shards of an uneven split have no row in the tables: all of their tiles count as partial.
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
def tile_tables(pattern: Mask, queries: TiledAxis, keys: TiledAxis, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which tiles of a whole call, cut like one shard of it, are not empty in a pattern, and which are full.

    `group` query heads share their tiles; a pattern that is the same for all heads has one group.

    Returns:
        Two bool [groups, parts, query tiles, key tiles].
    """
    some, every = classify_pattern_tiles(pattern, queries.cut, keys.cut)
    if not isinstance(pattern, MultiHeadMask):
        return some, every
    heads = np.array(pattern.mask_index_by_head).reshape(-1, group)
    return np.any(some[heads], axis=1), np.all(every[heads], axis=1)


def _any_chunk(tiles: Any) -> Any:
    """Returns the tiles in which a `mask_mod` lets some pair of some row and head attend; True if this is traced, or
    without a `mask_mod`.
    """
    return tiles.any(axis=(0, 1)) if isinstance(tiles, np.ndarray) else True


def _reachable(pattern: Mask | None, plan: TilePlan) -> np.ndarray:
    """Returns the tiles that the pattern alone leaves in any shard, for tables whose values are traced."""
    if pattern is None or pattern.shape[0] % plan.queries.length:
        return np.ones((1, plan.queries.tiles, plan.keys.tiles), bool)
    some, _ = tile_tables(pattern, plan.queries, plan.keys, plan.heads * plan.group)
    return some.reshape(-1, *some.shape[2:])
