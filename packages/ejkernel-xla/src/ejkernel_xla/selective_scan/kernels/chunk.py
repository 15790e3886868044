"""The tokens of a chunk: from the states before them to their reads and the states after them, and the pullback.

Arrays are time-major, [L, r, ...], and states are [r, E, I], so that the channels lie side by side.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning.fixed_tiles import scan_fixed
from ejkernel.planning.precision import product_precision


class ChunkTokens(NamedTuple):
    """Inputs of the tokens of a chunk, in the accumulator's dtype.

    Attributes:
        x: [L, r, I].
        step: [L, r, I]; 0 for masked tokens, which leaves the states as they are.
        write: [L, r, E].
        read: [L, r, E].
    """

    x: jax.Array
    step: jax.Array
    write: jax.Array
    read: jax.Array


StatesAndReads = tuple[jax.Array, jax.Array]
"""States after a chunk [r, E, I] and what its tokens read [L, r, I]; or the cotangents of both."""


def advance(associative: bool, state: jax.Array, tokens: ChunkTokens, decay: jax.Array) -> StatesAndReads:
    """Returns the states after a chunk and what its tokens read, from the states before it and A as [E, I]."""
    return (_associative_scan if associative else _sequential_scan)(state, tokens, decay)


def chunk_cotangents(
    associative: bool, state: jax.Array, tokens: ChunkTokens, decay: jax.Array, cotangents: StatesAndReads
) -> tuple[jax.Array, ChunkTokens, jax.Array]:
    """Returns the cotangents of the states before a chunk, of its tokens, and of A as [E, I]."""
    if associative:
        return jax.vjp(_associative_scan, state, tokens, decay)[1](cotangents)
    return _pull_sequential_scan(state, tokens, decay, cotangents)


def advance_token_by_token(state: jax.Array, tokens: ChunkTokens, decay: jax.Array, skip: jax.Array) -> StatesAndReads:
    """Returns the states after a chunk and its outputs, with D x added, by the same program for any number of tokens.

    The output of each token is computed in the loop, where XLA does not fuse it with arrays of all tokens.
    """

    def token(state: jax.Array, token: ChunkTokens) -> StatesAndReads:
        state = _state_after_token(state, token, decay)
        return state, _dot("rei,re->ri", state, token.read) + skip * token.x

    return scan_fixed(token, state, tokens, tokens.x.shape[0])


def _associative_scan(state: jax.Array, tokens: ChunkTokens, decay: jax.Array) -> StatesAndReads:
    decays = jnp.exp(tokens.step[:, :, None] * decay)
    written = tokens.write[..., None] * (tokens.step * tokens.x)[:, :, None]
    # log2(L) levels of whole-chunk arrays [L, r, E, I], so a chunk and not the sequence bounds the memory. Decays are
    # multiplied and never divided: a product that underflows forgets, as it should.
    decay_products, sums = lax.associative_scan(_combine_token_runs, (decays, written))
    states = decay_products * state + sums
    return states[-1], _dot("lrei,lre->lri", states, tokens.read)


def _combine_token_runs(one: StatesAndReads, other: StatesAndReads) -> StatesAndReads:
    """Combines two runs of tokens: the decay of the states across both, and what both add."""
    return one[0] * other[0], other[0] * one[1] + other[1]


def _sequential_scan(state: jax.Array, tokens: ChunkTokens, decay: jax.Array) -> StatesAndReads:
    def token(state: jax.Array, token: ChunkTokens) -> StatesAndReads:
        state = _state_after_token(state, token, decay)
        # A matrix product instead of a sum: XLA would fuse the sum with the state and compute the state twice.
        return state, _dot("rei,re->ri", state, token.read)

    return lax.scan(token, state, tokens)


def _state_after_token(state: jax.Array, token: ChunkTokens, decay: jax.Array) -> jax.Array:
    return jnp.exp(token.step[:, None] * decay) * state + token.write[..., None] * (token.step * token.x)[:, None]


def _pull_sequential_scan(
    state: jax.Array, tokens: ChunkTokens, decay: jax.Array, cotangents: StatesAndReads
) -> tuple[jax.Array, ChunkTokens, jax.Array]:
    """Recomputes the states of the chunk forwards, then passes their cotangents backwards."""
    # The chunk's states again, [L, r, E, I], from its first token on: dividing a state by its decay to go back would
    # lose all digits where the decay is small.
    last, states = lax.scan(lambda state, token: (_state_after_token(state, token, decay), state), state, tokens)
    ones = jnp.ones(state.shape[:2], state.dtype)

    def token(carry: tuple[jax.Array, ...], parts: tuple[ChunkTokens, jax.Array, jax.Array]) -> tuple[Any, ChunkTokens]:
        gradient, ddecay_acc, after = carry
        token, cotangent, before = parts
        gradient = gradient + token.read[..., None] * cotangent[:, None]
        # Handed to the token before: the decay lies between the two.
        decayed_gradient = gradient * jnp.exp(token.step[:, None] * decay)
        exponent = decayed_gradient * before  # cotangent of step * decay
        dproduct = _dot("rei,re->ri", gradient, token.write)  # of step * x
        pulled = ChunkTokens(
            x=dproduct * token.step,
            # Sums are matrix products with ones: XLA would fuse a sum with its operand, and compute the operand twice.
            step=dproduct * token.x + _dot("rei,re->ri", exponent * decay, ones),
            write=_dot("rei,ri->re", gradient, token.step * token.x),
            read=_dot("rei,ri->re", after, cotangent),
        )
        return (decayed_gradient, ddecay_acc + exponent * token.step[:, None], before), pulled

    start = (cotangents[0], jnp.zeros_like(state), last)
    (gradient, ddecay_acc, _), pulled = lax.scan(token, start, (tokens, cotangents[1], states), reverse=True)
    return gradient, pulled, ddecay_acc.sum(axis=0)


def _dot(axes: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(axes, one, other, precision=product_precision(one.dtype))
