"""Selects the key blocks that each query reads, by the softmax weight of the blocks' summaries."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import at_most, cdiv, is_symbolic, known_or
from ejkernel.planning.precision import product_precision
from ejkernel.planning.sorted_search import count_at_most

MAX_SCORES_AT_ONCE = 2**20
"""Scores of queries and blocks held at once."""

ASSUMED_ROWS, ASSUMED_BLOCKS = 8, 128
"""Batch rows and blocks for which memory is planned if their counts are symbolic."""


class BlockPositions(NamedTuple):
    """The positions of blocks and queries. B batch, T queries, M blocks in ascending order of their first keys.

    Attributes:
        starts: [M] int32, the first key of every block.
        size: Keys per block.
        query_positions: [B|1, T] int32, index of the key at each query's position.
        query_segment_ids: [B, T] int32, < 0 for padding; with block_ids: a query reads blocks of its own id.
        block_segment_ids: [B, M] int32.
    """

    starts: jax.Array
    size: int
    query_positions: jax.Array
    query_segment_ids: jax.Array | None
    block_segment_ids: jax.Array | None


def current_blocks(block_positions: BlockPositions) -> jax.Array:
    """Returns the block that holds each query's position, [B|1, T] int32; -1 for padding."""
    shape = block_positions.query_positions.shape
    after = count_at_most(block_positions.starts, block_positions.query_positions.reshape(-1))
    current = after.reshape(shape) - 1
    return (
        current
        if block_positions.query_segment_ids is None
        else jnp.where(block_positions.query_segment_ids >= 0, current, -1)
    )


def select_blocks(
    query: jax.Array, keys: jax.Array, scale: float, count: int, block_positions: BlockPositions
) -> jax.Array:
    """Returns the blocks with the largest softmax weight, summed over the query heads of a KV head, [B, T, Hk, N]
    int32.

    A query's own block comes first. Later blocks are never selected. Of two blocks with equal weights, the later one is
    selected. N is `count`; -1 fills up what is left. Holds `MAX_SCORES_AT_ONCE` scores at once, but for a query that
    has more.

    Args:
        query: [B, T, H, D].
        keys: [B, M, Hk, D], what stands for the keys of a block.
        scale: Factor on the scores.
        count: Blocks per query, at least its own.
        block_positions: Where the blocks lie.
    """
    query, keys = lax.stop_gradient((query, keys))
    rows, tokens, heads, _ = query.shape
    scores = known_or(rows, ASSUMED_ROWS) * heads * known_or(keys.shape[1], ASSUMED_BLOCKS)
    tile = max(1, at_most(MAX_SCORES_AT_ONCE // max(1, scores), tokens))
    tiles = cdiv(tokens, tile)
    others = max(0, at_most(count, keys.shape[1]) - 1)
    current = current_blocks(block_positions)
    if not others:
        shape = (rows, tokens, keys.shape[2], count)
        return jnp.where(jnp.arange(count) > 0, -1, jnp.broadcast_to(current[:, :, None, None], shape))

    def split_into_tiles(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, tiles * tile - tokens), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], tiles, tile, *x.shape[2:]).swapaxes(0, 1)

    def select_blocks_of_tile(inputs: tuple[Any, ...]) -> jax.Array:
        part, query_positions, current_block, q_ids = inputs
        return _indices_of_largest(
            _block_weights(
                part,
                keys,
                scale,
                block_positions._replace(query_positions=query_positions, query_segment_ids=q_ids),
                current_block,
            ),
            others,
        )

    parts = jax.tree.map(
        split_into_tiles, (query, block_positions.query_positions, current, block_positions.query_segment_ids)
    )
    picked_blocks = lax.map(select_blocks_of_tile, parts)
    picked_blocks = picked_blocks.swapaxes(0, 1).reshape(rows, tiles * tile, *picked_blocks.shape[3:])[:, :tokens]
    current = jnp.broadcast_to(current[:, :, None, None], (rows, tokens, keys.shape[2], 1))
    selected = jnp.concatenate([current, jnp.where(current >= 0, picked_blocks, -1)], axis=-1)
    return jnp.pad(selected, ((0, 0),) * 3 + ((0, max(0, count - selected.shape[3])),), constant_values=-1)


def _block_weights(
    query: jax.Array, keys: jax.Array, scale: float, block_positions: BlockPositions, current_block: jax.Array
) -> jax.Array:
    """Returns softmax weights of the complete blocks, summed over query heads, [B, t, Hk, M]; -1 where nothing is to
    take.
    """
    rows, tile, heads, channels = query.shape
    kv_heads = keys.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(rows, tile, kv_heads, heads // kv_heads, channels)
    exact: Any = {"precision": product_precision(query.dtype), "preferred_element_type": wide}
    scores = jnp.einsum("btghd,bmgd->btghm", grouped, keys, **exact) * scale
    complete = block_positions.starts + (block_positions.size - 1) <= block_positions.query_positions[:, :, None]
    if block_positions.query_segment_ids is not None and block_positions.block_segment_ids is not None:
        complete &= (block_positions.query_segment_ids[:, :, None] == block_positions.block_segment_ids[:, None]) & (
            block_positions.query_segment_ids >= 0
        )[:, :, None]
    before = (complete & (jnp.arange(keys.shape[1]) < current_block[:, :, None]))[:, :, None]
    complete = complete[:, :, None, None]
    row_max = jnp.max(scores, axis=-1, keepdims=True, where=complete, initial=-jnp.inf)
    weights = jnp.where(complete, jnp.exp(jnp.where(complete, scores - row_max, 0)), 0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
    return jnp.where(before, weights.sum(axis=3), -1)


def _indices_of_largest(weights: jax.Array, count: int) -> jax.Array:
    """Returns the indices of the `count` largest weights that are not negative, ties to the later; -1 fills up."""
    *leading_shape, blocks = weights.shape
    if not count:
        return jnp.zeros((*leading_shape, 0), jnp.int32)
    rows = weights.reshape(-1, blocks)[:, ::-1]
    if is_symbolic(blocks):  # there may be fewer
        rows = jnp.pad(rows, ((0, 0), (0, count)), constant_values=-1)
    values, indices = lax.top_k(rows, count)
    indices = jnp.where(values >= 0, blocks - 1 - indices.astype(jnp.int32), -1)
    return indices.reshape(*leading_shape, count)
