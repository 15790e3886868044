"""Gates of a chunk: those of a head weigh whole tokens, those of channels weigh each channel of a token.

Weights are exponentials of sums of gates, never of differences, see `fading`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_xla.linear_recurrence.fading import Spans, corners, spans, triangle
from ejkernel_xla.linear_recurrence.products import (
    dots,
    expand,
    fade,
    gram,
    masked,
    multiply,
    multiply_columns,
    multiply_rows,
    multiply_shared_columns,
    weigh,
)


@dataclasses.dataclass(frozen=True)
class HeadGates:
    """One gate a head and token.

    Attributes:
        between: [n, C, C] weights of the gates after token j up to and with token i; 0 for j > i.
        since: [n, C] weights of the gates up to and with each token.
    """

    between: jax.Array
    since: jax.Array

    @classmethod
    def of(cls, gates: jax.Array) -> "HeadGates":
        """From [n, C, 1] log gates."""
        return cls(*_weights(gates[..., 0]))

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """What tokens find in the states before the chunk, once these have faded: [n, C, V]."""
        return weigh(multiply(expand(left, state.shape[0]), state, precision), self.since)

    def pairs(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """<left_i, w_ij right_j> for j <= i, else 0: [n, C, C]."""
        return masked(_shared_products(left, right, precision), self.between)

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """The states after the chunk."""
        write = weigh(write, self.between[..., -1, :])
        update = multiply_shared_columns(key, write, precision)
        return fade(state, self.since[..., -1:]) + update


@dataclasses.dataclass(frozen=True)
class ChannelGates:
    """One gate a channel of the keys, head and token.

    Attributes:
        levels: The spans of the gates.
    """

    levels: list[Spans]

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        left = expand(left, state.shape[0])
        return multiply(left * self.levels[-1].since[..., 0, :, :], state, precision)

    def pairs(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        left, right = expand(left, count), expand(right, count)
        return triangle(dots(left, right), corners(left, right, self.levels, precision))

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        key = expand(key, state.shape[0]) * self.levels[-1].until[..., 0, :, :]
        update = multiply_columns(key, write, precision)
        return fade(state, self.levels[-1].since[..., 0, -1, :]) + update


@dataclasses.dataclass(frozen=True)
class NoGates:
    """Nothing fades."""

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        return multiply(expand(left, state.shape[0]), state, precision)

    def pairs(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        return expand(jnp.tril(_shared_products(left, right, precision)), count)

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """As of `HeadGates`."""
        return state + multiply_shared_columns(key, write, precision)


KeyGates = HeadGates | ChannelGates | NoGates


def key_gates(decay: jax.Array | None) -> KeyGates:
    """Of a chunk's `decay`."""
    if decay is None:
        return NoGates()
    return ChannelGates(spans(decay)) if decay.shape[-1] > 1 else HeadGates.of(decay)


def _shared_products(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Products of all pairs of tokens, [m, C, C], with m the most that the two have."""
    count = max(left.shape[0], right.shape[0])
    if left is right:
        return gram(left, precision)
    return multiply_rows(expand(left, count), expand(right, count), precision)


@jax.custom_vjp
def _weights(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`between` and `since` of `HeadGates`, from [n, C]."""
    levels = spans(gates[..., None])
    one = jnp.ones((*gates.shape, 1), gates.dtype)
    between = triangle(one[..., 0], corners(one, one, levels))
    return between, levels[-1].since[..., 0, :, 0]


def _weights_saved(gates: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    weights = _weights(gates)
    return weights, weights


def _weights_gradient(weights: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    """Gate k is in the weights of all pairs of a token from k on and one before it."""
    between, since = (x * y for x, y in zip(weights, cotangent, strict=True))
    ones = jnp.ones_like(between)
    behind = jnp.matmul(jnp.triu(ones), between, precision=lax.Precision.HIGHEST)
    return (dots(behind, jnp.tril(ones, -1)) + lax.cumsum(since, axis=since.ndim - 1, reverse=True),)


_weights.defvjp(_weights_saved, _weights_gradient)
