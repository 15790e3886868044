"""Defines the argument record of RWKV-4's weighted average, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, array

INITIAL_MAX_EXPONENT = -1e30
"""The running maximum before the first token."""


@arguments
class WKV:
    """Canonical input of one call. B rows, T tokens, C channels.

    Attributes:
        decay: [C] floating, log of the decay per token, at most 0.
        bonus: [C] floating, added to the key of the current token.
        key: [B, T, C] floating.
        value: [B, T, C], same dtype as key.
        initial_state: [B, 3, C] floating: numerator and denominator, both over the exponential of the third, the
            running maximum of the keys; None is 0, 0 and `INITIAL_MAX_EXPONENT`.
    """

    decay: jax.Array = array("i", gradient=True)
    bonus: jax.Array = array("i", gradient=True)
    key: jax.Array = array("b t i", gradient=True)
    value: jax.Array = array("b t i", gradient=True)
    initial_state: jax.Array | None = array("b c i", gradient=True, default=None)


State = tuple[jax.Array, jax.Array, jax.Array]
"""Numerator, denominator and running maximum, each [B, C]."""


def accumulator(record: WKV) -> Any:
    """Returns the dtype of states and sums: float32, or float64 for float64 values."""
    return jnp.promote_types(record.value.dtype, jnp.float32)


def first_state(record: WKV) -> State:
    """Returns the state before the first token."""
    if record.initial_state is not None:
        state = record.initial_state.astype(accumulator(record))
        return state[:, 0], state[:, 1], state[:, 2]
    rows, _, channels = record.key.shape
    zeros = jnp.zeros((rows, channels), accumulator(record))
    return zeros, zeros, jnp.full_like(zeros, INITIAL_MAX_EXPONENT)


def state_after_token(
    decay_and_bonus: tuple[jax.Array, jax.Array], state: State, token: tuple[jax.Array, jax.Array]
) -> tuple[State, jax.Array]:
    """Returns the state after a token and the token's output, entry by entry.

    Args:
        decay_and_bonus: Decay and bonus.
        state: The state before the token.
        token: Its key and value.
    """
    (decay, bonus), (numerator, denominator, row_max), (key, value) = decay_and_bonus, state, token
    output = _weighted_average(numerator, denominator, row_max, bonus + key, value)
    new_max = jnp.maximum(decay + row_max, key)
    alpha, weight = jnp.exp(decay + row_max - new_max), jnp.exp(key - new_max)
    return (alpha * numerator + weight * value, alpha * denominator + weight, new_max), output


def _weighted_average(
    numerator: jax.Array, denominator: jax.Array, row_max: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Returns the average of the state and a value with the weight exp(key); 0 where neither has a weight."""
    new_max = jnp.maximum(row_max, key)
    alpha, weight = jnp.exp(row_max - new_max), jnp.exp(key - new_max)
    total = alpha * denominator + weight
    # Selected before the division, so that the gradient is 0 there too.
    empty = total == 0
    return jnp.where(empty, 0, (alpha * numerator + weight * value) / jnp.where(empty, 1, total))
