"""Block maps of tiled attention: which tiles of scores are full, partial or empty, and lists of those with work.

Band, segments and positions come from `tile_pairs`, and `mask_mod` from `mask_functions`; a pattern
(`ejkernel.types.sparse_masks.Mask`) is cut into tiles here, on the host and once for every pattern and tile size:

    pattern  -->  some, every   bool [heads, parts, query tiles, key tiles]
                  mask_ids      which tile mask a partial tile has
                  tile_masks    int8 [different tile masks, q_block_size, kv_block_size]

Equal tile masks are kept once, so a pattern that repeats itself, such as a band, has few of them. A record that is one
shard of a call looks up its own heads and its own part of the queries, by `dropout_origin`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention.mask_functions import tiles_of_mask_function
from ejkernel.families.tiled_attention.record import TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import TileCut, classify_tile_pairs, tile_cuts
from ejkernel.types.sparse_masks import Mask, MultiHeadMask, TileSpans

FULL_MASK_ID, EMPTY_MASK_ID = 0, 1
"""Ids of the tile masks in which every pair, and no pair, attends."""
MAX_COUNTED_TILES = 512
"""Tiles that are ordered by counting, in time quadratic in their number."""
MAX_MASK_PAIRS_AT_ONCE = 2**26
"""Pairs of tiles whose masks are computed in one call: 64 MiB of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternTiles:
    """A record's part of its pattern, cut into tiles; traced where the record is one shard of a call.

    Attributes:
        any_allowed: Whether a pair attends, bool [H|1, query tiles, key tiles].
        all_allowed: Whether all pairs attend, in the same layout.
        mask_ids: The index of each tile's mask, int32, in the same layout.
        tile_masks: int8 [n, q_block_size, kv_block_size], 0 beyond the call's last query and key.
        reachable: Whether a pair may attend in any part and head that the record may have at run time; NumPy, [n, query
            tiles, key tiles].
    """

    any_allowed: Any
    all_allowed: Any
    mask_ids: Any
    tile_masks: np.ndarray
    reachable: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMap:
    """The tile pairs of a record: which are full, partial or empty under all masks of the record.

    Attributes:
        any_allowed: Whether a pair may attend, bool [B|1, H|1, query tiles, key tiles].
        all_allowed: Whether all pairs may attend, in the same layout; False for a tile that ends past its array.
        mask_ids: Which tile mask a tile has, int32 [1, H|1, query tiles, key tiles]; None without a pattern.
        tile_masks: int8 [n, q_block_size, kv_block_size]; None without a pattern.
        reachable: Whether a pair may attend for any value of `any_allowed`, which may be traced; NumPy, [n, query
            tiles, key tiles].
    """

    any_allowed: Any
    all_allowed: Any
    mask_ids: Any
    tile_masks: np.ndarray | None
    reachable: np.ndarray

    @property
    def xp(self) -> Any:
        """Returns the module of the tables' arrays: `numpy`, or `jax.numpy` if they are traced."""
        return np if isinstance(self.any_allowed, np.ndarray) and isinstance(self.all_allowed, np.ndarray) else jnp

    def transposed_by_keys(self) -> "BlockMap":
        """Returns the map with keys before queries, from which `block_lists` makes the query tiles of every
        key tile.
        """
        some, every, ids, reachable = (
            None if x is None else x.swapaxes(-1, -2)
            for x in (self.any_allowed, self.all_allowed, self.mask_ids, self.reachable)
        )
        return dataclasses.replace(self, any_allowed=some, all_allowed=every, mask_ids=ids, reachable=reachable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLists:
    """For every tile of one side, the list of tiles of the other side that have work, full tiles first. Entries from
    `count` on are unused.

    Attributes:
        full: Number of full tiles in each list, int32 [B|1, H|1, tiles].
        count: Length of each list, int32 [B|1, H|1, tiles].
        blocks: int32 [B|1, H|1, tiles, longest list].
        mask_ids: Which tile mask each has, in the shape of `blocks`; None without a pattern.
    """

    full: Any
    count: Any
    blocks: Any
    mask_ids: Any


def block_map(record: TiledAttention, q_block_size: int, kv_block_size: int) -> BlockMap:
    """Returns the block map of a record, as `padding_as_segments` gives it and for which `pattern_refusals` has none.

    Its arrays are NumPy's unless positions, segment ids, captured arrays of `mask_mod` or a shard's origin are traced.
    """
    some, every, _ = classify_tile_pairs(record, *tile_cuts(record, q_block_size, kv_block_size))
    some, every = some[:, None], every[:, None]
    if record.mask_mod is not None:
        some_of_function, every_of_function = tiles_of_mask_function(record, (q_block_size, kv_block_size))
        some, every = some & some_of_function, every & every_of_function
    reachable = (
        some.reshape(-1, *some.shape[2:]) if isinstance(some, np.ndarray) else np.ones((1, *some.shape[2:]), bool)
    )
    if (tiles_of_pattern := pattern_tiles(record, q_block_size, kv_block_size)) is None:
        return BlockMap(any_allowed=some, all_allowed=every, mask_ids=None, tile_masks=None, reachable=reachable)
    return BlockMap(
        any_allowed=some & tiles_of_pattern.any_allowed,
        all_allowed=every & tiles_of_pattern.all_allowed,
        mask_ids=tiles_of_pattern.mask_ids[None],
        tile_masks=tiles_of_pattern.tile_masks,
        reachable=reachable & tiles_of_pattern.reachable,
    )


def block_lists(blocks: BlockMap) -> BlockLists:
    """Lists the tiles along the last axis of a block map."""
    xp = blocks.xp
    rank = xp.where(blocks.any_allowed & blocks.all_allowed, 0, xp.where(blocks.any_allowed, 1, 2))
    longest = max(1, int(blocks.reachable.sum(axis=-1).max()))
    is_counted = xp is jnp and blocks.mask_ids is None and rank.shape[-1] <= MAX_COUNTED_TILES
    order = _order_by_counting(rank) if is_counted else xp.argsort(rank, axis=-1, stable=True)
    listed = order[..., :longest].astype(np.int32)
    full, count = ((rank < limit).sum(axis=-1).astype(np.int32) for limit in (1, 2))
    ids = blocks.mask_ids
    if ids is not None:
        ids = xp.take_along_axis(xp.broadcast_to(ids, (*listed.shape[:-1], ids.shape[-1])), listed, axis=-1)
    return BlockLists(full=full, count=count, blocks=listed, mask_ids=ids)


def _order_by_counting(rank: jax.Array) -> jax.Array:
    """Returns the result of a stable `argsort` along the last axis, in two XLA kernels; a sort takes many on a GPU."""
    index = jnp.arange(rank.shape[-1], dtype=jnp.int32)
    distinct = rank.astype(jnp.int32) * rank.shape[-1] + index
    place = jnp.sum(distinct[..., None, :] < distinct[..., None], axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[..., None, :] == index[:, None], index, 0), axis=-1, dtype=jnp.int32)


def pattern_refusals(record: TiledAttention) -> tuple[str, ...]:
    """Returns why the pattern of a record cannot be cut into tiles."""
    pattern, (_, queries, heads, _), keys = record.pattern, record.query.shape, record.key.shape[1]
    if pattern is None:
        return ()
    if pattern.shape[0] % queries or (pattern.heads or heads) % heads:
        return (f"pattern of {pattern.shape[0]} queries has no even parts of {queries} queries and {heads} heads",)
    return () if pattern.shape[1] == keys else (f"pattern of {pattern.shape[1]} keys has no part of {keys} keys",)


def pattern_tiles(record: TiledAttention, q_block_size: int, kv_block_size: int) -> PatternTiles | None:
    """Returns the record's part of its pattern; None without a pattern."""
    pattern, origin, (_, queries, heads, _) = record.pattern, record.dropout_origin, record.query.shape
    if pattern is None:
        return None
    some, every, ids, tile_masks = _cut(pattern, queries, q_block_size, kv_block_size)
    head_patterns = np.array(pattern.mask_index_by_head if isinstance(pattern, MultiHeadMask) else (0,))
    if origin is None:
        tile_offsets: Any = (head_patterns[:heads], 0)
        some, every, ids = some[tile_offsets], every[tile_offsets], ids[tile_offsets]
        return PatternTiles(any_allowed=some, all_allowed=every, mask_ids=ids, tile_masks=tile_masks, reachable=some)
    reachable = some.reshape(-1, *some.shape[2:])
    if head_patterns.size > 1:
        head_patterns = jnp.asarray(head_patterns)[origin[1] + jnp.arange(heads, dtype=jnp.int32)]
    tile_offsets = (head_patterns, origin[2] // queries)
    some, every, ids = (jnp.asarray(x)[tile_offsets] for x in (some, every, ids))
    return PatternTiles(any_allowed=some, all_allowed=every, mask_ids=ids, tile_masks=tile_masks, reachable=reachable)


def classify_pattern_tiles(pattern: Mask, q_cut: TileCut, kv_cut: TileCut) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a whole pattern makes of its tiles: which it reaches, and which it fills.

    Returns:
        Two bool [different heads, parts of `q_cut.length` queries, query tiles, key tiles].
    """
    heads, rows, columns = _distinct_masks_and_tile_spans(pattern, q_cut, kv_cut)
    head_tiles = [mask.tiles(rows, columns) for mask in heads]
    shape = (len(heads), -1, q_cut.tiles, kv_cut.tiles)
    return np.stack([x.any_allowed for x in head_tiles]).reshape(shape), np.stack(
        [x.all_allowed for x in head_tiles]
    ).reshape(shape)


def _distinct_masks_and_tile_spans(
    pattern: Mask, q_cut: TileCut, kv_cut: TileCut
) -> tuple[tuple[Mask, ...], TileSpans, TileSpans]:
    """Returns the different heads of a pattern, and first and last index of its tiles of queries, in all parts, and of
    keys.
    """
    starts = np.arange(0, pattern.shape[0], q_cut.length)[:, None]
    rows = TileSpans((starts + q_cut.low).reshape(-1), (starts + q_cut.high).reshape(-1))
    heads = pattern.distinct_masks if isinstance(pattern, MultiHeadMask) else (pattern,)
    return heads, rows, TileSpans(kv_cut.low, kv_cut.high)


@functools.lru_cache(maxsize=16)
def _cut(
    pattern: Mask, queries: int, q_block_size: int, kv_block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tables [different heads, parts of so many queries, query tiles, key tiles] of a whole pattern, and tile masks."""
    q_cut, kv_cut = TileCut(queries, q_block_size), TileCut(pattern.shape[1], kv_block_size)
    heads, rows, columns = _distinct_masks_and_tile_spans(pattern, q_cut, kv_cut)
    some, every = classify_pattern_tiles(pattern, q_cut, kv_cut)
    ids = np.where(every, FULL_MASK_ID, EMPTY_MASK_ID).astype(np.int32)
    flat_ids, partial = (x.reshape(len(heads), rows.low.size, columns.low.size) for x in (ids, some & ~every))
    whole = np.ones((q_block_size, kv_block_size), bool)
    known = {np.packbits(whole).tobytes(): FULL_MASK_ID, np.packbits(~whole).tobytes(): EMPTY_MASK_ID}
    for head, mask in enumerate(heads):
        for places, masks in _partial_tile_masks(mask, rows, columns, partial[head], (q_block_size, kv_block_size)):
            packed = np.packbits(masks.reshape(len(masks), -1), axis=1)
            flat_ids[head][places] = [known.setdefault(bits.tobytes(), len(known)) for bits in packed]
    bits = np.stack([np.frombuffer(x, np.uint8) for x in known])
    tile_masks = np.unpackbits(bits, axis=1, count=whole.size).reshape(-1, q_block_size, kv_block_size).astype(np.int8)
    return some, every, ids, tile_masks


def _partial_tile_masks(
    mask: Mask, rows: TileSpans, columns: TileSpans, selected: np.ndarray, block: tuple[int, int]
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
    """Yields the masks of the wanted tiles, many at once: their places, and bool [n, *block].

    Tiles that the end of an array cuts short are asked for in their own size: an array's mask has no more.
    """
    at = np.argwhere(selected)
    sizes = np.stack([(rows.high - rows.low)[at[:, 0]], (columns.high - columns.low)[at[:, 1]]], axis=1) + 1
    limit = max(1, MAX_MASK_PAIRS_AT_ONCE // (block[0] * block[1]))
    for size in np.unique(sizes, axis=0):
        same_size_tiles = at[(sizes == size).all(axis=1)]
        for part in np.split(same_size_tiles, range(limit, len(same_size_tiles), limit)):
            with jax.ensure_compile_time_eval():
                starts = jnp.asarray(rows.low[part[:, 0]], jnp.int32), jnp.asarray(columns.low[part[:, 1]], jnp.int32)
                ask = functools.partial(mask.allowed, sizes=(int(size[0]), int(size[1])))
                allowed = np.asarray(jax.vmap(ask)(*starts))
            masks = np.zeros((len(part), *block), bool)
            masks[:, : size[0], : size[1]] = allowed
            yield (part[:, 0], part[:, 1]), masks
