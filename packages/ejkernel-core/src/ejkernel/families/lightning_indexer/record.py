"""Defines the argument record of the lightning indexer, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.arguments import arguments, array, static

TopKeyIndicesAndScores = tuple[jax.Array, jax.Array]
"""Indices [B, T, K] int32 of the keys with the largest scores, and these scores."""


@arguments
class LightningIndexer:
    """Canonical input of one call. B batch, T queries, S keys, H indexer heads, D channels.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, D], same dtype as query; all heads share it.
        weights: [B, T, H] floating.
        key_starts: [B|1, T] int32, the first key that a query may select, at least 0.
        key_ends: [B|1, T] int32, the key after the last one, at most S. Causality, windows, packed sequences and
            padding are all such ranges; a query with an empty one selects nothing.
        top_k: K, how many keys are selected per query.
        softmax_scale: Factor on the products of queries and keys.
    """

    query: jax.Array = array("b t h d", gradient=True)
    key: jax.Array = array("b s d", gradient=True)
    weights: jax.Array = array("b t h", gradient=True)
    key_starts: jax.Array = array("b t")
    key_ends: jax.Array = array("b t")
    top_k: int = static()
    softmax_scale: float = static()


def accumulator(record: LightningIndexer) -> Any:
    """Returns the dtype of products, sums and scores: float32, or float64 for float64 queries."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def floats_from_ordered_integers(integers: jax.Array, dtype: Any) -> jax.Array:
    """Returns the floats of integers from `ejkernel.families.expert_routing.order_preserving_integers`.

    -0 comes back as 0.
    """
    smallest = jnp.iinfo(integers.dtype).min
    return lax.bitcast_convert_type(jnp.where(integers < 0, smallest - integers, integers), dtype)


def take_keys(keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the keys at some indices, 0 for an index below 0: [S, D] and [..., K] -> [..., K, D]."""
    if not keys.shape[0]:
        return jnp.zeros((*indices.shape, keys.shape[1]), keys.dtype)
    return jnp.where((indices >= 0)[..., None], keys[jnp.maximum(indices, 0)], 0)
