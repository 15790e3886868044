"""Plans the blocks that each program computes, and returns a record's arrays in the kernels' layout.

The block lists are small tables that the kernels read. Without a pattern the blocks of a tile are consecutive, and so
are the full ones among them:

    first        full_start              full_end       last
      |  partial  |          full           |  partial   |

With a pattern or `mask_mod` every tile has a list: full blocks first, then the partial ones, each with the id of its
tile mask, which is 0 without a pattern.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention, block_maps, make_dropout_keys
from ejkernel.families.tiled_attention.block_maps import BlockMap, block_map
from ejkernel.families.tiled_attention.tile_pairs import classify_tile_pairs, nonempty_and_full_tile_runs, tile_cuts
from ejkernel_triton.tiled_attention.spec import has_pair_functions, pair_function_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The tables with the blocks of each program.

    Attributes:
        block_lists: int32 [B|1, ...], the operand of that name.
        tile_masks: int8 [1, n, block_q, block_kv], the operand of that name; None without a pattern.
        list_shape: The constant `LIST_SHAPE`: heads (1 if all share) and row length; None without a pattern.
    """

    block_lists: jax.Array
    tile_masks: jax.Array | None
    list_shape: tuple[int, int] | None


def plan_key_blocks(record: TiledAttention, block_q: int, block_kv: int) -> BlockTables:
    """Returns the key tiles of every query tile: [B|1, query tiles, 4], or [B|1, H|1, query tiles, list]."""
    # Without segments and positions these are NumPy arrays, and the table is a constant of the traced program.
    if not has_block_lists(record):
        nonempty, full_pairs, xp = classify_tile_pairs(record, *tile_cuts(record, block_q, block_kv))
        return _consecutive_blocks(nonempty, full_pairs, xp)
    return _listed_blocks(block_map(record, block_q, block_kv))


def plan_query_blocks(record: TiledAttention, block_q: int, block_kv: int) -> BlockTables:
    """Returns the query tiles of every key tile, for all query heads; in the form of `plan_key_blocks`."""
    if not has_block_lists(record):
        nonempty, full_pairs, xp = classify_tile_pairs(record, *tile_cuts(record, block_q, block_kv))
        return _consecutive_blocks(nonempty.swapaxes(1, 2), full_pairs.swapaxes(1, 2), xp)
    return _listed_blocks(block_map(record, block_q, block_kv).transposed_by_keys())


def plan_bias_blocks(record: TiledAttention, block_q: int, block_kv: int) -> BlockTables:
    """Returns the blocks for the gradient of the bias.

    They are those of `plan_key_blocks`, except that with a pattern they are the block map, of ids and -1: a program has
    one tile of the map, and would have to search a list. The map is smaller than the bias.
    """
    if not has_block_lists(record):
        return plan_key_blocks(record, block_q, block_kv)
    tile_map = block_map(record, block_q, block_kv)
    ids = jnp.where(jnp.asarray(tile_map.any_allowed), 0 if tile_map.mask_ids is None else tile_map.mask_ids, -1)
    tile_masks = None if tile_map.mask_ids is None else _tile_mask_array(tile_map)
    return BlockTables(block_lists=ids, tile_masks=tile_masks, list_shape=(ids.shape[1], ids.shape[3]))


def has_block_lists(record: TiledAttention) -> bool:
    """Returns whether every tile has a list of blocks: with a pattern and with `mask_mod`."""
    return record.pattern is not None or record.mask_mod is not None


def _consecutive_blocks(nonempty_blocks: Any, full_blocks: Any, xp: Any) -> BlockTables:
    table = xp.stack(nonempty_and_full_tile_runs(nonempty_blocks, full_blocks, xp), axis=-1).astype(np.int32)
    return BlockTables(block_lists=jnp.asarray(table), tile_masks=None, list_shape=None)


def _tile_mask_array(pattern_block_map: BlockMap) -> jax.Array:
    return jnp.asarray(pattern_block_map.tile_masks)[None]


def _listed_blocks(pattern_block_map: BlockMap) -> BlockTables:
    """Returns rows of full, count, and then alternately a block and its tile mask's id: [B|1, H|1, tiles, 2 + 2 *
    longest].
    """
    lists = block_maps.block_lists(pattern_block_map)
    mask_ids = jnp.zeros_like(lists.blocks) if lists.mask_ids is None else jnp.asarray(lists.mask_ids)
    entries = jnp.stack([jnp.asarray(lists.blocks), mask_ids], axis=-1)
    counts = jnp.stack([jnp.asarray(lists.full), jnp.asarray(lists.count)], axis=-1)
    table = jnp.concatenate([counts, entries.reshape(*entries.shape[:-2], -1)], axis=-1)
    return BlockTables(
        block_lists=table,
        tile_masks=None if lists.mask_ids is None else _tile_mask_array(pattern_block_map),
        list_shape=(table.shape[1], table.shape[3]),
    )


def kernel_operands(record: TiledAttention, blocks: BlockTables) -> tuple[jax.Array | None, ...]:
    """Returns the inputs of every kernel, in their order; the backward kernels take more after them.

    Query, key, value, block lists, segment ids of queries and keys, positions of queries and keys, bias, mask or the
    words of the caller's functions, sinks [1, H], dropout's keys of the rows [B, H, T] and of the columns [1, S], and
    tile masks.
    """
    return (
        record.query,
        record.key,
        record.value,
        blocks.block_lists,
        record.q_segment_ids,
        record.kv_segment_ids,
        record.q_positions,
        record.kv_positions,
        record.bias,
        pair_function_words(record) if has_pair_functions(record) else record.mask,
        None if record.softmax_aux is None else record.softmax_aux[None],
        *(make_dropout_keys(record) if record.dropout_prob > 0.0 else (None, None)),
        blocks.tile_masks,
    )
