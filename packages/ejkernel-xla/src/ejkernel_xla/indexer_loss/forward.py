"""Forward pass of the indexer's loss: attention's weights of the listed keys, averaged over heads, are its target."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import at_most
from ejkernel.families.indexer_loss import (
    FAMILY,
    IndexerLoss,
    IndexerLossResiduals,
    accumulator,
    indexer_loss_per_query,
)
from ejkernel.families.lightning_indexer import take_keys
from ejkernel.planning.precision import product_precision
from ejkernel_xla.query_tiles import QueryTile, forward_in_query_tiles, join_tiles, split_into_tiles


def forward(record: IndexerLoss, config: QueryTile) -> tuple[jax.Array, IndexerLossResiduals]:
    """Returns the losses and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Queries per tile.

    Returns:
        [B, T] in the accumulator's dtype, and attention's weights [B, T, K].
    """
    if config.batch_invariant:
        return forward_in_query_tiles(forward, record, FAMILY.axes_of(record), config, 1)
    if not record.query.size or not record.key.size or not record.indices.size:
        target = jnp.zeros(record.indices.shape, accumulator(record))
    else:
        arrays = (record.query, record.key.swapaxes(1, 2), record.indices)
        target = lax.map(lambda row: _row(row, record, config), arrays)
    return indexer_loss_per_query(record, target), IndexerLossResiduals(target=target)


def _row(row: tuple[jax.Array, ...], record: IndexerLoss, config: QueryTile) -> jax.Array:
    """Returns the weights [T, K] of one batch row, from queries [T, H, D], keys [Hk, S, D] and indices [T, K]."""
    query, key, indices = row
    tokens, heads, size = query.shape
    block, dtype = at_most(config.block_q, tokens), accumulator(record)
    by_head = query.reshape(tokens, key.shape[0], heads // key.shape[0], size)

    def tile(arrays: tuple[Any, ...]) -> jax.Array:
        query, indices = arrays
        is_listed = (indices >= 0)[:, None]

        def add_head(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            query, key = head
            listed, precision = take_keys(key, indices), product_precision(query.dtype)
            scores = jnp.einsum("tgd,tkd->tgk", query, listed, precision=precision, preferred_element_type=dtype)
            scores = jnp.where(is_listed, scores * record.softmax_scale, -jnp.inf)
            row_max = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(row_max == -jnp.inf, 0, row_max))
            row_sum = jnp.sum(weights, axis=-1, keepdims=True)
            return total + jnp.sum(weights / jnp.where(row_sum != 0, row_sum, 1), axis=1), None

        total, _ = lax.scan(add_head, jnp.zeros(indices.shape, dtype), (query.swapaxes(0, 1), key))
        return jnp.where(is_listed[:, 0], total / heads, 0)

    return join_tiles(
        lax.map(tile, (split_into_tiles(by_head, block), split_into_tiles(indices, block, fill=-1))), tokens
    )
