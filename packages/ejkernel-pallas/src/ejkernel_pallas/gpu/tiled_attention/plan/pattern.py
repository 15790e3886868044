"""Patterns and `mask_mod`: lists of full and partial blocks, and the masks of partial blocks as bits that threads test.

Without either, the blocks that a tile loops over are contiguous, and four indices per tile say which are full. With
one, every tile has a list, and the same four numbers are positions in it:

    forward     first block | full blocks | partial blocks      a query tile's key blocks
    backward    full blocks | partial blocks                    a key tile's query blocks, last one first

A tile without work has one partial block in its list, so that the same code writes its output. Kernels compute
`mask_mod` for partial blocks; a pattern has masks, the empty one for such a block. In the
accumulator of a product a thread has two of every eight columns of a row; so the mask of 128 columns is a word of 32
bits for each row and each of four threads:

    tile_masks int8 [n, rows, columns]  -->  words int32 [1, n, rows * (columns / 128) * 4]
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import EMPTY_MASK_ID, BlockLists, BlockMap, block_lists, block_map
from ejkernel_pallas.gpu.tiled_attention.spec import COLUMNS_PER_MASK_WORD_SPAN

THREADS_PER_SCORE_ROW = 4
"""Threads that share a row."""


def key_block_lists(record: TiledAttention, block_q: int, block_kv: int) -> dict[str, jax.Array]:
    """Returns the forward kernel's operands for a pattern or `mask_mod`.

    Args:
        record: A record with a pattern or `mask_mod`.
        block_q: Queries per tile.
        block_kv: Keys per block.

    Returns:
        `table` int32 [B|1, H|1, query tiles, 4], `blocks` [B|1, H|1, query tiles, longest list]; with a pattern
        also the `mask_ids` of these, and `mask_words` as above.
    """
    tile_map = _add_empty_blocks(block_map(record, block_q, block_kv))
    lists = block_lists(tile_map)
    masks = {} if tile_map.tile_masks is None else {"mask_words": _pack_mask_words(tile_map.tile_masks)}
    return _as_int32(table=_block_range_table(lists), blocks=lists.blocks, **_mask_ids(lists), **masks)


def query_block_lists(record: TiledAttention, block_q: int, block_kv: int) -> tuple[dict[str, jax.Array], Any]:
    """Returns the backward kernel's operands for a pattern or `mask_mod`, and the table, in NumPy if known when traced.

    Args:
        record: A record with a pattern.
        block_q: Queries per block.
        block_kv: Keys per tile.

    Returns:
        As in `key_block_lists` with keys for queries; also the `ranks` of the blocks, the number of key tiles that add
        to them before this one, and `first` [B|1, H|1, query blocks], which is the number of key tiles if none adds.

    Blocks take the last key tile first, and loop over earlier queries first. Patterns often have keys at the start that
    all queries attend to: if they were the first to add, all others would wait for the longest list.
    """
    tile_map = _add_empty_blocks(block_map(record, block_q, block_kv).transposed_by_keys())
    lists = block_lists(_reverse_blocks(tile_map))
    some, blocks = tile_map.any_allowed, tile_map.any_allowed.shape[-1] - 1 - lists.blocks
    xp = _array_module(some)
    later_key_tiles = xp.cumsum(some[:, :, ::-1], axis=2)[:, :, ::-1] - some
    later_key_tiles = xp.broadcast_to(later_key_tiles, (*blocks.shape[:-1], some.shape[-1]))
    table = _block_range_table(lists)
    tile_masks = tile_map.tile_masks
    masks = {} if tile_masks is None else {"mask_words": _pack_mask_words(tile_masks.swapaxes(1, 2))}
    arrays = _as_int32(
        table=table,
        blocks=blocks,
        **_mask_ids(lists),
        ranks=xp.take_along_axis(later_key_tiles, blocks, axis=-1),
        **masks,
        first=xp.where(some.any(axis=2), 0, some.shape[2]),
    )
    return arrays, table


def _array_module(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _block_range_table(lists: BlockLists) -> Any:
    """Returns int32 [B|1, H|1, tiles, 4]: full blocks are the first of a list."""
    xp = _array_module(lists.count)
    zeros = xp.zeros_like(lists.count)
    return xp.stack([zeros, zeros, lists.full, lists.count], axis=-1)


def _reverse_blocks(tile_map: BlockMap) -> BlockMap:
    """Reverses the map's last axis: loops traverse the lists from their end, so the first block comes first."""
    return dataclasses.replace(
        tile_map,
        any_allowed=tile_map.any_allowed[..., ::-1],
        all_allowed=tile_map.all_allowed[..., ::-1],
        mask_ids=None if tile_map.mask_ids is None else tile_map.mask_ids[..., ::-1],
        reachable=tile_map.reachable[..., ::-1],
    )


def _as_int32(**arrays: Any) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}


def _add_empty_blocks(tile_map: BlockMap) -> BlockMap:
    """Returns the map with a block for every tile: the first one, fully masked, if there is no other."""
    is_first_block = np.arange(tile_map.any_allowed.shape[-1]) == 0
    is_added = ~tile_map.any_allowed.any(axis=-1, keepdims=True) & is_first_block
    xp = _array_module(is_added)
    return dataclasses.replace(
        tile_map,
        any_allowed=tile_map.any_allowed | is_added,
        all_allowed=tile_map.all_allowed & ~is_added,
        mask_ids=None if tile_map.mask_ids is None else xp.where(is_added, EMPTY_MASK_ID, tile_map.mask_ids),
        reachable=tile_map.reachable | is_first_block,
    )


def _mask_ids(lists: BlockLists) -> dict[str, Any]:
    """Returns the masks of a pattern's blocks; none for `mask_mod`, which the kernels compute."""
    return {} if lists.mask_ids is None else {"mask_ids": lists.mask_ids}


def _pack_mask_words(tile_masks: np.ndarray) -> np.ndarray:
    """Returns tile masks [n, rows, columns] as words."""
    count, rows, columns = tile_masks.shape
    tile_masks = np.pad(tile_masks, ((0, 0), (0, 0), (0, -columns % COLUMNS_PER_MASK_WORD_SPAN)))
    mask_bits = tile_masks.reshape(
        count, rows, -1, COLUMNS_PER_MASK_WORD_SPAN // 8, THREADS_PER_SCORE_ROW, 2
    ).transpose(0, 1, 2, 4, 3, 5)
    packed_bits = np.packbits(
        mask_bits.reshape(
            count, rows, -1, THREADS_PER_SCORE_ROW, COLUMNS_PER_MASK_WORD_SPAN // THREADS_PER_SCORE_ROW
        ).astype(bool),
        axis=-1,
        bitorder="little",
    )
    return np.ascontiguousarray(packed_bits).view("<i4").reshape(1, count, -1)
