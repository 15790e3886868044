"""Defines the argument record of the indexer's loss, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, array, static


@arguments
class IndexerLoss:
    """Canonical input of one call. B batch, T queries, S keys, H query heads, Hk KV heads, K listed keys.

    Attributes:
        query: [B, T, H, D] floating, of attention.
        key: [B, S, Hk, D], same dtype as query.
        indices: [B, T, K] int32, the keys that each query lists; below 0 for none.
        scores: [B, T, K] floating, the indexer's scores of these keys.
        softmax_scale: Factor on attention's raw scores.
    """

    query: jax.Array = array("b t h d")
    key: jax.Array = array("b s g d")
    indices: jax.Array = array("b t k")
    scores: jax.Array = array("b t k", gradient=True)
    softmax_scale: float = static()


@arguments
class IndexerLossResiduals:
    """The residuals of a forward pass.

    Attributes:
        target: [B, T, K] float32, attention's weights of the listed keys, averaged over heads; 0 where none is listed.
    """

    target: jax.Array


def accumulator(record: IndexerLoss) -> Any:
    """Returns the dtype of scores, weights and losses: float32, or float64 for float64 queries or scores."""
    return jnp.promote_types(jnp.promote_types(record.query.dtype, record.scores.dtype), jnp.float32)


def indexer_loss_per_query(record: IndexerLoss, target: jax.Array) -> jax.Array:
    """Returns the loss of each query, [B, T]: the divergence of the indexer's softmax from a target [B, T, K]."""
    is_listed = record.indices >= 0
    scores = jnp.where(is_listed, record.scores.astype(target.dtype), -jnp.inf)
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    row_max = jax.lax.stop_gradient(jnp.where(row_max == -jnp.inf, 0, row_max))
    row_sum = jnp.sum(jnp.where(is_listed, jnp.exp(jnp.where(is_listed, scores - row_max, 0)), 0), axis=-1)
    lse = jnp.log(jnp.where(row_sum != 0, row_sum, 1)) + row_max[..., 0]
    log_share = jnp.where(is_listed, record.scores.astype(target.dtype), 0) - lse[..., None]
    has_weight = target != 0  # also where it is NaN
    terms = target * (jnp.log(jnp.where(has_weight, target, 1)) - log_share)
    return jnp.sum(jnp.where(is_listed & has_weight, terms, 0), axis=-1)
