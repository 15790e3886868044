"""One chunk of a linear recurrence: the states before it to its outputs and the states after it, as matrix products.

With weights w_ij = exp(sum of the gates of tokens j+1..i), S_0 the state before the chunk and u_j what token j writes:

    o_i = scale ((q_i * w_i0)^T S_0 + sum_{j <= i} <q_i, w_ij k_j> u_j)
    S_C = w_C0 S_0 + sum_j (w_Cj k_j) u_j^T

The delta rule's u solves a unit lower triangular system (the UT transform; Yang et al. 2024, arXiv:2412.06464):

    u_i + beta_i sum_{j < i} <k_i, w_ij k_j> u_j = beta_i (v_i - (k_i * w_i0)^T S_0)

whose matrix is inverted block by block.

Shapes: r rows, H heads, C tokens, a power of two; all arrays are [r, heads, C, ...] in the accumulator's dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, accumulator
from ejkernel_xla.linear_recurrence.fading import Spans, corners, gather, inverse, outer, spans, triangle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens of a chunk; those that take part in nothing have keys and gates of 0.

    Attributes:
        query: [r, Hq, C, K].
        key: [r, Hk, C, K].
        value: [r, Hv, C, V].
        decay: [r|1, H|1, C, K|1] log gates, or None.
        value_decay: [r, H, C, V] log gates, or None.
        beta: [r, H, C], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array | None
    value_decay: jax.Array | None
    beta: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Gates:
    """Gates of the keys' or the values' channels over a chunk; `levels` is None where nothing fades."""

    levels: list[Spans] | None

    def since_start(self, x: jax.Array) -> jax.Array:
        """[..., C, d] weighted by the gates up to and with each token."""
        return x if self.levels is None else x * jnp.exp(self.levels[-1].since[..., 0, :, :])

    def until_end(self, x: jax.Array) -> jax.Array:
        """[..., C, d] weighted by the gates after each token."""
        return x if self.levels is None else x * jnp.exp(self.levels[-1].until[..., 0, :, :])

    def whole(self) -> jax.Array | None:
        """Weight of the whole chunk, [..., d]; None where nothing fades."""
        return None if self.levels is None else jnp.exp(self.levels[-1].since[..., 0, -1, :])


def advance(state: jax.Array, chunk: Chunk, scale: float, precision: Any) -> tuple[jax.Array, jax.Array]:
    """Outputs [r, H, C, V] and the states [r, H, K, V] after a chunk, from the states before it."""
    keys, values = _gates(chunk)
    key, write = expand(chunk.key, state), _writes(state, chunk, keys, precision)
    before = jnp.matmul(keys.since_start(expand(chunk.query, state)), state, precision=precision)
    output = values.since_start(before) + _within(chunk, write, keys, values, precision)
    return scale * output, _after(state, key, write, keys, values, precision)


def next_state(state: jax.Array, chunk: Chunk, precision: Any) -> jax.Array:
    """The states after a chunk alone."""
    keys, values = _gates(chunk)
    write = _writes(state, chunk, keys, precision)
    return _after(state, expand(chunk.key, state), write, keys, values, precision)


def expand(x: jax.Array, state: jax.Array) -> jax.Array:
    """[r, heads, ...] with as many heads as the state has."""
    return jnp.repeat(x, state.shape[1] // x.shape[1], axis=1)


def _gates(chunk: Chunk) -> tuple[Gates, Gates]:
    keys = None if chunk.decay is None else spans(chunk.decay)
    return Gates(keys), Gates(None if chunk.value_decay is None else spans(chunk.value_decay))


def _after(state: jax.Array, key: jax.Array, write: jax.Array, keys: Gates, values: Gates, precision: Any) -> jax.Array:
    if (weight := keys.whole()) is not None:
        state = state * weight[..., :, None]
    if (weight := values.whole()) is not None:
        state = state * weight[..., None, :]
    key = jnp.swapaxes(keys.until_end(key), -1, -2)
    return state + jnp.matmul(key, values.until_end(write), precision=precision)


def _writes(state: jax.Array, chunk: Chunk, keys: Gates, precision: Any) -> jax.Array:
    """What every token writes, [r, H, C, V]."""
    value = expand(chunk.value, state)
    if chunk.beta is None:
        return value
    key, beta = expand(chunk.key, state), chunk.beta[..., None]
    wants = beta * (value - jnp.matmul(keys.since_start(key), state, precision=precision))
    if key.shape[-2] == 1:
        return wants
    overlaps = corners(beta * key, key, keys.levels, precision)
    return jnp.matmul(inverse(overlaps, precision), wants, precision=precision)


def _within(chunk: Chunk, write: jax.Array, keys: Gates, values: Gates, precision: Any) -> jax.Array:
    """What the tokens of a chunk read from each other, [r, H, C, V]."""
    heads = write.shape[1]
    if values.levels is None:
        return jnp.matmul(_weights(chunk.query, chunk.key, keys, heads, precision), write, precision=precision)
    query, key = expand(chunk.query, write), expand(chunk.key, write)
    squares = corners(query, key, keys.levels, precision)
    return gather(jnp.sum(query * key, axis=-1), squares, write, values.levels, precision)


def _weights(left: jax.Array, right: jax.Array, keys: Gates, heads: int, precision: Any) -> jax.Array:
    """<left_i, w_ij right_j> for j <= i, else 0: [r, heads, C, C]."""
    length, shared = left.shape[-2], max(left.shape[1], right.shape[1])
    left, right = (jnp.repeat(x, shared // x.shape[1], axis=1) for x in (left, right))
    if keys.levels is not None and keys.levels[0].since.shape[-1] > 1:
        left, right = (jnp.repeat(x, heads // shared, axis=1) for x in (left, right))
        return triangle(jnp.sum(left * right, axis=-1), corners(left, right, keys.levels, precision))
    products = jnp.repeat(outer(left, right, precision), heads // shared, axis=1)
    if keys.levels is None:
        return jnp.tril(products)
    one = jnp.ones((1, 1, length, 1), left.dtype)  # with one gate a head, the weights are a matrix of their own
    return products * triangle(one[..., 0], corners(one, one, keys.levels))


def precision(record: LinearRecurrence) -> lax.Precision:
    """Of the matrix products: 16-bit inputs do not need float32's last digits, others do."""
    if record.precision is not None:
        return record.precision
    wide = jnp.finfo(record.query.dtype).bits >= jnp.finfo(accumulator(record)).bits
    return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
