"""Defines the divergence of a student's distribution from a teacher's, in plain jnp.

With p = softmax(student / tau), q = softmax(teacher / tau) and KL(a, b) = sum over v of a_v (log a_v - log b_v):

    forward    tau^2 KL(q, p)
    reverse    tau^2 KL(p, q)
    jsd        tau^2 (beta KL(q, m) + (1 - beta) KL(p, m))          m = beta q + (1 - beta) p
    entropy    -tau^2 sum over v of q_v log q_v

Terms of probability 0 are 0. The gradient with respect to the student's logits is, in the same order,

    tau (p - q)        tau p (log p - log q - KL(p, q))        tau (1 - beta) p (log (p / m) - KL(p, m))

The teacher has none. Tokens that do not count have divergence 0 and pass no gradient on.

Source: Hinton et al. 2015, arXiv:1503.02531 (distillation, with the factor of tau^2); Agarwal et al. 2023,
arXiv:2306.13649 (the generalised Jensen-Shannon divergence).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.kl_divergence.record import KLDivergence, accumulator


def log_softmax(record: KLDivergence, logits: jax.Array) -> jax.Array:
    """Returns log-probabilities of tempered logits over the whole vocabulary; of tokens that do not count, of zeros."""
    scaled = jnp.where(record.token_mask[:, None], logits, 0).astype(accumulator(record)) / record.temperature
    largest = lax.stop_gradient(jnp.max(scaled, axis=1, keepdims=True))
    if record.vocab_axis is not None:
        largest = lax.pmax(largest, record.vocab_axis)
    total = jnp.sum(jnp.exp(scaled - largest), axis=1, keepdims=True)
    if record.vocab_axis is not None:
        total = lax.psum(total, record.vocab_axis)
    return scaled - largest - jnp.log(total)


def divergence_terms(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    """Returns the terms of KL(a, b); 0 where a is."""
    positive = log_a > -jnp.inf
    return jnp.where(positive, jnp.exp(log_a) * (jnp.where(positive, log_a, 0) - jnp.where(positive, log_b, 0)), 0)


def log_mixture(record: KLDivergence, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Returns the log-probabilities of the mixture."""
    return jnp.logaddexp(log_q + jnp.log(record.beta), log_p + jnp.log1p(-record.beta))


def reference(record: KLDivergence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Computes the result of the family in plain jnp; in float64 if student or teacher is float64, else in float32.

    Returns:
        The divergence and the teacher's entropy, [T] each; of a vocabulary that is split, this device's part of them.
        There are no residuals.
    """
    log_p, log_q = log_softmax(record, record.student), lax.stop_gradient(log_softmax(record, record.teacher))
    if record.direction == "forward":
        terms = divergence_terms(log_q, log_p)
    elif record.direction == "reverse":
        terms = divergence_terms(log_p, log_q)
    else:
        log_m = log_mixture(record, log_p, log_q)
        terms = record.beta * divergence_terms(log_q, log_m) + (1 - record.beta) * divergence_terms(log_p, log_m)
    temperature_squared, active = record.temperature**2, record.token_mask
    entropy = -temperature_squared * jnp.sum(divergence_terms(log_q, jnp.zeros_like(log_q)), axis=1)
    return (jnp.where(active, temperature_squared * jnp.sum(terms, axis=1), 0), jnp.where(active, entropy, 0)), ()
