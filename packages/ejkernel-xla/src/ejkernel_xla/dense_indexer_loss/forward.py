"""Forward pass of the dense indexer loss: two loops over tiles of keys for each tile of queries.

The first loop sums the denominators of both softmaxes, the second one the terms of the divergence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.dense_indexer_loss import DenseIndexerLoss, DenseIndexerLossResiduals, accumulator
from ejkernel_xla.dense_indexer_loss.config import LossTiles, sizes
from ejkernel_xla.dense_indexer_loss.kernels.tile_scores import (
    KeyRows,
    QueryTile,
    TileScores,
    key_tiles,
    mean_weights,
    tile_scores,
)
from ejkernel_xla.query_tiles import join_tiles, split_into_tiles


class RunningSum(NamedTuple):
    """The sum of exponentials of scores so far, `total * exp(row_max)`."""

    row_max: jax.Array
    total: jax.Array


def forward(record: DenseIndexerLoss, config: LossTiles) -> tuple[jax.Array, DenseIndexerLossResiduals]:
    """Returns the losses and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        [B, T] in the accumulator's dtype, and the denominators of both softmaxes.
    """
    (rows, tokens, heads, _), dtype = record.query.shape, accumulator(record)
    if not record.query.size or not record.key.size:
        residuals = DenseIndexerLossResiduals(
            attention_lse=jnp.full((rows, tokens, heads), -jnp.inf, dtype),
            index_lse=jnp.full((rows, tokens), -jnp.inf, dtype),
        )
        return jnp.zeros((rows, tokens), dtype), residuals
    losses, attention_lse, index_lse = lax.map(lambda row: _row(row[0], row[1], record, config), rows_of(record))
    return losses, DenseIndexerLossResiduals(attention_lse=attention_lse, index_lse=index_lse)


def rows_of(record: DenseIndexerLoss) -> tuple[QueryTile, KeyRows]:
    """Returns the arrays of a record with an axis of batch rows."""
    starts, ends = (jnp.broadcast_to(x, record.query.shape[:2]) for x in (record.key_starts, record.key_ends))
    queries = QueryTile(record.query, record.query_index, record.index_weights, starts, ends)
    return queries, KeyRows(record.key, record.key_index)


def fill_tiles(keys: KeyRows, block_k: int) -> KeyRows:
    """Returns the keys of a row with zeros after the last one, up to a whole tile."""
    missing = cdiv(keys.key.shape[0], block_k) * block_k - keys.key.shape[0]
    return KeyRows(*(jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in keys))


def _row(queries: QueryTile, keys: KeyRows, record: DenseIndexerLoss, config: LossTiles) -> tuple[jax.Array, ...]:
    """Returns the losses [T] and the denominators [T, H] and [T] of one batch row."""
    tokens, (block_q, block_k) = queries.query.shape[0], sizes(record, config)
    keys = fill_tiles(keys, block_k)
    tiles = QueryTile(*(split_into_tiles(x, block_q) for x in queries))
    results = lax.map(lambda tile: _tile(tile, keys, record, block_k), tiles)
    return tuple(join_tiles(x, tokens) for x in results)


def _tile(tile: QueryTile, keys: KeyRows, record: DenseIndexerLoss, block_k: int) -> tuple[jax.Array, ...]:
    """Returns the losses and the denominators of a tile of queries."""
    dtype, bounds = accumulator(record), key_tiles(tile, keys, block_k)

    def add_exponentials(n: jax.Array, sums: tuple[RunningSum, RunningSum]) -> tuple[RunningSum, RunningSum]:
        scores = tile_scores(tile, keys, record, n * block_k, block_k)
        return _add(sums[0], scores.attention_scores), _add(sums[1], scores.index_scores)

    shapes = tile.query.shape[:2], tile.query.shape[:1]
    empty = (RunningSum(jnp.full(x, -jnp.inf, dtype), jnp.zeros(x, dtype)) for x in shapes)
    attention, index = lax.fori_loop(*bounds, add_exponentials, tuple(empty))
    attention_lse, index_lse = _lse(attention), _lse(index)

    def add_terms(n: jax.Array, loss: jax.Array) -> jax.Array:
        scores = tile_scores(tile, keys, record, n * block_k, block_k)
        return loss + jnp.sum(_terms(scores, finite(attention_lse), finite(index_lse)), axis=1)

    loss = lax.fori_loop(*bounds, add_terms, jnp.zeros(shapes[1], dtype))
    return loss, attention_lse, index_lse


def _terms(scores: TileScores, attention_lse: jax.Array, index_lse: jax.Array) -> jax.Array:
    """Returns the terms of the divergence, [t, k]; 0 where a key has no weight."""
    weights = mean_weights(scores, attention_lse)
    has_weight = scores.attends & (weights != 0)  # also where it is NaN
    log_ratio = jnp.log(jnp.where(has_weight, weights, 1)) - (scores.index_scores - index_lse[:, None])
    return jnp.where(has_weight, weights * log_ratio, 0)


def _add(so_far: RunningSum, scores: jax.Array) -> RunningSum:
    """Returns the sum with the exponentials of a tile's scores [..., k]."""
    row_max = jnp.maximum(so_far.row_max, jnp.max(scores, axis=-1))
    shift = finite(row_max)
    total = so_far.total * jnp.exp(so_far.row_max - shift) + jnp.sum(jnp.exp(scores - shift[..., None]), axis=-1)
    return RunningSum(row_max, total)


def _lse(sums: RunningSum) -> jax.Array:
    """Returns the logarithm of a sum, -inf where it has no terms."""
    has_terms = sums.total != 0  # also where it is NaN
    return jnp.where(has_terms, jnp.log(jnp.where(has_terms, sums.total, 1)) + finite(sums.row_max), -jnp.inf)


def finite(x: Any) -> jax.Array:
    """Returns x with 0 instead of -inf, as the shift of an exponential."""
    return jnp.where(x == -jnp.inf, 0, x)
