"""Computes the terms of the backward pass that each query head has once: they do not depend on the key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.token_sparse_attention.record import TokenSparseAttention, accumulator
from ejkernel.types.pullback import Pullback


class SoftmaxGradientTerms(NamedTuple):
    """Terms of the gradient of each score s: `p (<cotangent, v> - delta)` with `p = exp(s - lse)`. B, T, H as in the
    record.

    Attributes:
        delta: [B, T, H] in the accumulator's dtype: <cotangent, output>, less the cotangent of lse.
        lse: [B, T, H], 0 where it is -inf: a query has nothing to attend to.
    """

    delta: jax.Array
    lse: jax.Array


def softmax_gradient_terms(pullback: Pullback) -> SoftmaxGradientTerms:
    """Returns delta and lse of a backward pass."""
    record, lse = pullback.record, pullback.residuals.lse.swapaxes(1, 2)
    dtype = accumulator(record)
    # A query without keys has an output of 0 whatever the sinks are, so its cotangent, which may be NaN, adds nothing.
    lists_keys = jnp.any(record.indices >= 0, axis=-1)
    lists_keys = jnp.repeat(lists_keys, record.query.shape[2] // lists_keys.shape[2], axis=2)
    products = pullback.cotangent.astype(dtype) * pullback.output.astype(dtype)
    delta = jnp.where(lists_keys, jnp.sum(products, axis=-1), 0)
    if pullback.lse_cotangent is not None:
        # A row with nothing to attend has no gradient, whatever the cotangent of its lse holds.
        delta = delta - jnp.where(lse == -jnp.inf, 0, pullback.lse_cotangent.swapaxes(1, 2))
    return SoftmaxGradientTerms(delta=delta, lse=jnp.where(lse == -jnp.inf, 0, lse))


def sink_gradient(record: TokenSparseAttention, terms: SoftmaxGradientTerms) -> jax.Array | None:
    """Returns the gradient of the sinks, [H]; None without sinks."""
    if record.softmax_aux is None:
        return None
    weights = jnp.exp(record.softmax_aux.astype(terms.delta.dtype) - terms.lse)
    return -jnp.sum(weights * terms.delta, axis=(0, 1))
