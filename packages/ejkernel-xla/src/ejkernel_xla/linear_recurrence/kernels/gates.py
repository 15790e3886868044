"""Gates of a chunk: one per head decays whole tokens, one per channel decays each channel of a token.

Weights are exponentials of sums of gates, never of differences; see `decay_weights`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.promotion import with_standard_promotion
from ejkernel.types.forward_mode import reverse_rule
from ejkernel_xla.linear_recurrence.kernels.decay_weights import (
    DecaySpans,
    decay_spans,
    lower_triangular_matrix,
    off_diagonal_squares,
)
from ejkernel_xla.linear_recurrence.kernels.products import (
    decay_rows,
    dot_products,
    multiply,
    multiply_columns,
    multiply_rows,
    multiply_shared_columns,
    repeat_along_first_axis,
    row_products_of_matrix,
    scale_vectors,
    weigh_products,
)


@dataclasses.dataclass(frozen=True)
class HeadGates:
    """One gate a head and token.

    Attributes:
        pair_decay: [n, C, C] weights of the gates after token j up to and with token i; 0 for j > i.
        decay_since_start: [n, C] weights of the gates up to and with each token.
    """

    pair_decay: jax.Array
    decay_since_start: jax.Array

    @classmethod
    def of(cls, gates: jax.Array) -> "HeadGates":
        """Creates the gates from log gates [n, C, 1]."""
        return cls(*_decay_weights(gates[..., 0]))

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """Returns what tokens read of the states before the chunk, decayed up to each token: [n, C, V]."""
        return scale_vectors(
            multiply(repeat_along_first_axis(left, state.shape[0]), state, precision), self.decay_since_start
        )

    def pair_products(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """Returns products of all pairs of tokens, decayed: <left_i, w_ij right_j> for j <= i, else 0: [n, C, C]."""
        return weigh_products(_shared_products(left, right, precision), self.pair_decay)

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns the states after the chunk."""
        return decay_rows(state, self.decay_since_start[..., -1:]) + self.update(key, write, precision)

    def update(self, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns what the chunk adds to the states."""
        # On values, so that heads that share keys stay one product (`multiply_shared_columns`).
        return multiply_shared_columns(key, scale_vectors(write, self.pair_decay[..., -1, :]), precision)


@dataclasses.dataclass(frozen=True)
class ChannelGates:
    """One gate a channel of the keys, head and token.

    Attributes:
        levels: The spans of the gates.
    """

    levels: list[DecaySpans]

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """Returns what tokens read of the states before the chunk; see `HeadGates`."""
        left = repeat_along_first_axis(left, state.shape[0])
        return multiply(left * self.levels[-1].decay_since_start[..., 0, :, :], state, precision)

    def pair_products(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """Returns products of all pairs of tokens, decayed and masked; see `HeadGates`."""
        left, right = repeat_along_first_axis(left, count), repeat_along_first_axis(right, count)
        return lower_triangular_matrix(
            dot_products(left, right), off_diagonal_squares(left, right, self.levels, precision)
        )

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns the states after the chunk; see `HeadGates`."""
        return decay_rows(state, self.levels[-1].decay_since_start[..., 0, -1, :]) + self.update(key, write, precision)

    def update(self, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns what the chunk adds to the states; see `HeadGates`."""
        key = repeat_along_first_axis(key, write.shape[0]) * self.levels[-1].decay_until_end[..., 0, :, :]
        return multiply_columns(key, write, precision)


@dataclasses.dataclass(frozen=True)
class NoGates:
    """No decay."""

    def read(self, left: jax.Array, state: jax.Array, precision: Any) -> jax.Array:
        """Returns what tokens read of the states before the chunk; see `HeadGates`."""
        return multiply(repeat_along_first_axis(left, state.shape[0]), state, precision)

    def pair_products(self, left: jax.Array, right: jax.Array, count: int, precision: Any) -> jax.Array:
        """Returns products of all pairs of tokens, decayed and masked; see `HeadGates`."""
        return repeat_along_first_axis(jnp.tril(_shared_products(left, right, precision)), count)

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns the states after the chunk; see `HeadGates`."""
        return state + self.update(key, write, precision)

    def update(self, key: jax.Array, write: jax.Array, precision: Any) -> jax.Array:
        """Returns what the chunk adds to the states; see `HeadGates`."""
        return multiply_shared_columns(key, write, precision)


KeyGates = HeadGates | ChannelGates | NoGates


def key_gates(decay: jax.Array | None) -> KeyGates:
    """Returns the gates of a chunk, by the shape of its `decay`."""
    if decay is None:
        return NoGates()
    return ChannelGates(decay_spans(decay)) if decay.shape[-1] > 1 else HeadGates.of(decay)


def _shared_products(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns products of all pairs of tokens, [m, C, C], with m the most that the two have."""
    count = max(left.shape[0], right.shape[0])
    if left is right:
        return row_products_of_matrix(left, precision)
    return multiply_rows(repeat_along_first_axis(left, count), repeat_along_first_axis(right, count), precision)


@reverse_rule
@jax.custom_vjp
def _decay_weights(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `between` and `decay_since_start` of `HeadGates` for gates [n, C]."""
    levels = decay_spans(gates[..., None])
    one = jnp.ones((*gates.shape, 1), gates.dtype)
    between = lower_triangular_matrix(one[..., 0], off_diagonal_squares(one, one, levels))
    return between, levels[-1].decay_since_start[..., 0, :, 0]


@with_standard_promotion
def _weights_fwd(gates: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    weights = _decay_weights(gates)
    return weights, weights


@with_standard_promotion
def _weights_bwd(weights: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    """Returns the gradients of the gates. Gate k is a factor in the weight of every pair of a token from k on and a
    token before k.
    """
    between, decay_since_start = (x * y for x, y in zip(weights, cotangent, strict=True))
    ones = jnp.ones_like(between)
    # A gate is a logarithm, so its gradient is weight times cotangent, summed over the pairs it separates: no division,
    # and none of the halvings is differentiated. A gate of -inf has weights of 0, and with them a gradient of 0.
    suffix_sums = jnp.matmul(jnp.triu(ones), between, precision=lax.Precision.HIGHEST)
    return (
        dot_products(suffix_sums, jnp.tril(ones, -1))
        + lax.cumsum(decay_since_start, axis=decay_since_start.ndim - 1, reverse=True),
    )


_decay_weights.defvjp(_weights_fwd, _weights_bwd)
