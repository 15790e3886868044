"""Factors of the gradient of tokens' logits, which are the same however the logits are computed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.cross_entropy.record import CrossEntropy, accumulator, target_probability_sums


class LogitGradientFactors(NamedTuple):
    """The gradient of a token's logits is `scale * (softmax * softmax_factor - targets * target_factor)`.

    The scale leaves numbers of about 1, for products of 16 bits. It is a token's own, and a power of 2: so it rounds
    nothing, and a token's gradient does not depend on the others.

    Attributes:
        lse: [t], the log-sum-exp.
        softmax_factor: [t].
        target_factor: [t].
        scale: [t].
    """

    lse: jax.Array
    softmax_factor: jax.Array
    target_factor: jax.Array
    scale: jax.Array

    def select_tokens(self, start: jax.Array | int, size: int) -> "LogitGradientFactors":
        """Returns the factors of `size` tokens from `start` on."""
        return LogitGradientFactors(*(lax.dynamic_slice_in_dim(x, start, size) for x in self))


def logit_gradient_factors(
    record: CrossEntropy, lse: jax.Array, loss_cotangent: jax.Array | float, lse_cotangent: jax.Array | float
) -> LogitGradientFactors:
    """Returns the factors of tokens whose losses have the cotangent `loss_cotangent`, and whose log-sum-exps have
    `lse_cotangent`.
    """
    dtype = accumulator(record)
    weights = record.weights.astype(dtype) * loss_cotangent
    mass = target_probability_sums(record)
    active = record.weights != 0
    softmax_factor = jnp.where(active, weights * (mass + 2 * record.z_loss * lse) + lse_cotangent, 0)
    target_factor = jnp.where(active, weights, 0)
    scale = power_of_two(jnp.maximum(jnp.abs(softmax_factor), jnp.abs(target_factor)))
    return LogitGradientFactors(lse, softmax_factor / scale, target_factor / scale, scale)


def power_of_two(x: jax.Array) -> jax.Array:
    """Returns the largest powers of 2 that are at most x; 1 for 0 and for what is not finite."""
    usual = jnp.isfinite(x) & (x > jnp.finfo(x.dtype).tiny)
    _, exponent = jnp.frexp(jnp.where(usual, x, 1))
    return jnp.where(usual, jnp.ldexp(jnp.ones_like(x), exponent - 1), 1)
