"""Summaries of pieces of a shard, against what the formula says of all of its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import LinearRecurrence, piece_summaries, reference
from ejkernel.planning.token_shards import apply_factor

TOKENS, NEAR = 14, 4
ALL = jnp.ones((2, TOKENS), bool)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Two pieces of two tokens are tried first; all tokens are seven."""
    monkeypatch.setattr(piece_summaries, "TOKENS_PER_PIECE", NEAR // piece_summaries.PIECES_AT_BORDER)


def run(record):
    return reference(record)[0]


class Kernel:
    """Computes gradients of initial states alone, with any number of columns."""

    def __call__(self, record):
        return run(record)

    def row_states(self, record, output_cotangent, final_states_cotangent):
        if output_cotangent is None:
            return None
        return initial_state_gradient(record, output_cotangent, final_states_cotangent)


def initial_state_gradient(record, *cotangents):
    begin = jnp.zeros((*record.query.shape[::2], record.query.shape[3], record.value.shape[3]))
    [gradient] = jax.vjp(lambda begin: run(dataclasses.replace(record, initial_state=begin)), begin)[1](cotangents)
    return gradient


def make(gate, channels=1):
    """A delta rule with two value channels, four key channels and a gate for all tokens; gates alone with channels."""
    keys = jax.random.split(jax.random.key(0), 5)
    query, key = (jax.random.normal(k, (2, TOKENS, 2, 4)) / 2 for k in keys[:2])
    value, state = jax.random.normal(keys[2], (2, TOKENS, 2, 2)), jax.random.normal(keys[3], (2, 2, 4, 2))
    beta, decay = jax.nn.sigmoid(jax.random.normal(keys[4], (2, TOKENS, 2))), jnp.full((2, TOKENS, 2, channels), gate)
    beta = beta if channels == 1 else None
    return LinearRecurrence(
        query=query, key=key, value=value, softmax_scale=0.5, beta=beta, decay=decay, initial_state=state
    )


@pytest.mark.parametrize(("gate", "channels"), [(-0.1, 1), (-30.0, 1), (-0.1, 4)])
def test_summary_of_pieces_maps_entering_state_to_final_state(gate, channels):
    record = make(gate, channels)
    factor, added = piece_summaries.summary_of_pieces(run, record, ALL)
    state = apply_factor(factor, record.initial_state, channels == 1) + added
    np.testing.assert_allclose(state, run(record)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "channels", "call"), [(-0.1, 1, run), (-30.0, 1, run), (-0.1, 1, Kernel()), (-0.1, 4, run)]
)
def test_gradient_of_pieces_is_that_of_the_entering_state(gate, channels, call):
    """Rows of two value channels give two columns of a factor of four each, unless a kernel takes more columns."""
    record = make(gate, channels)
    cotangents = jax.random.normal(jax.random.key(1), record.value.shape), jnp.ones_like(record.initial_state)
    factor, gradient = piece_summaries.gradient_of_pieces(call, record, ALL, *cotangents)
    got = apply_factor(factor, cotangents[1], channels == 1) + gradient
    np.testing.assert_allclose(got, initial_state_gradient(record, *cotangents), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gate", "is_forgotten"), [(-0.1, False), (-30.0, True)])
def test_tokens_that_are_forgotten_are_not_read(gate, is_forgotten):
    """NaN far from the border reaches a summary only where gates let it."""
    record = make(gate)
    far = record.value.at[:, :-NEAR].set(jnp.nan)
    _, added = piece_summaries.summary_of_pieces(run, dataclasses.replace(record, value=far), ALL)
    assert bool(jnp.isfinite(added).all()) == is_forgotten


def test_shards_of_few_chosen_tokens_keep_their_factor():
    """The tokens before those at the border belong to another sequence: what is near is all."""
    record, chosen = make(-0.1), jnp.arange(TOKENS)[None] >= TOKENS - 3
    chosen = jnp.broadcast_to(chosen, (2, TOKENS))
    factor, added = piece_summaries.summary_of_pieces(run, record, chosen)
    part = piece_summaries.slice_tokens(record, TOKENS - 3, TOKENS, chosen)
    want = run(dataclasses.replace(part, initial_state=record.initial_state))[1]
    np.testing.assert_allclose(factor @ record.initial_state + added, want, rtol=1e-4, atol=1e-5)


def test_a_factor_that_float64_holds_is_not_forgotten():
    with jax.enable_x64(True):
        factor = jnp.full((1, 2, 1, 1), 1e-40)
        kept, forgotten = (piece_summaries.is_forgotten(x, jnp.array([True])) for x in (factor, factor**8))
    assert (bool(kept), bool(forgotten)) == (False, True)
