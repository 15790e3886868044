"""Defines the argument record of the dense indexer loss, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, array, static


@arguments
class DenseIndexerLoss:
    """Canonical input of one call. B batch, T queries, S keys, H query heads, Hk KV heads, Hi indexer heads.

    Attributes:
        query: [B, T, H, D] floating, of attention.
        key: [B, S, Hk, D], same dtype as query.
        query_index: [B, T, Hi, Di] floating, of the indexer.
        key_index: [B, S, Di], same dtype as query_index.
        index_weights: [B, T, Hi] floating.
        key_starts: [B|1, T] int32, the first key of each query, at least 0.
        key_ends: [B|1, T] int32, the key after its last one, at most S. A query with an empty range has a loss of 0.
        softmax_scale: Factor on attention's raw scores.
        index_softmax_scale: Factor on the products of the indexer.
    """

    query: jax.Array = array("b t h d")
    key: jax.Array = array("b s g d")
    query_index: jax.Array = array("b t j e", gradient=True)
    key_index: jax.Array = array("b s e", gradient=True)
    index_weights: jax.Array = array("b t j", gradient=True)
    key_starts: jax.Array = array("b t")
    key_ends: jax.Array = array("b t")
    softmax_scale: float = static()
    index_softmax_scale: float = static()


@arguments
class DenseIndexerLossResiduals:
    """The residuals of a forward pass, of queries without keys -inf.

    Attributes:
        attention_lse: [B, T, H] in the accumulator's dtype, log of the denominators of attention's softmax.
        index_lse: [B, T] in the accumulator's dtype, the same of the indexer's.
    """

    attention_lse: jax.Array
    index_lse: jax.Array


def accumulator(record: DenseIndexerLoss) -> Any:
    """Returns the dtype of scores, weights and losses: float32, or float64 for float64 arrays."""
    return jnp.promote_types(jnp.promote_types(record.query.dtype, record.query_index.dtype), jnp.float32)
