"""The gradient of the divergences in XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.kl_divergence import KLDivergence, divergence_terms, log_mixture, log_softmax
from ejkernel.types.pullback import Pullback


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradient of the student's logits.

    Args:
        pullback: Record and cotangents [T] of the divergences; those of the entropies have no effect.
        config: Not read.

    Returns:
        `{"student": [T, V]}` in the student's dtype.
    """
    record, (cotangent, _) = pullback.record, pullback.cotangent
    log_p, log_q = log_softmax(record, record.student), log_softmax(record, record.teacher)
    p = jnp.exp(log_p)
    if record.direction == "forward":
        # A teacher that has no logit above -inf makes NaN of both passes.
        gradient = p - jnp.exp(log_q)
    elif record.direction == "reverse":
        gradient = _gradient_by_log_p(record, log_p, log_q)
    else:
        gradient = (1 - record.beta) * _gradient_by_log_p(record, log_p, log_mixture(record, log_p, log_q))
    gradient = record.temperature * gradient * cotangent[:, None]
    return {"student": jnp.where(record.token_mask[:, None], gradient, 0).astype(record.student.dtype)}


def _gradient_by_log_p(record: KLDivergence, log_p: jax.Array, log_other: jax.Array) -> jax.Array:
    """Returns `p (log p - log other - KL(p, other))`, 0 where p is."""
    terms = divergence_terms(log_p, log_other)
    total = jnp.sum(terms, axis=1, keepdims=True)
    if record.vocab_axis is not None:
        total = lax.psum(total, record.vocab_axis)
    return terms - jnp.exp(log_p) * total
