"""The summaries of shards, against what the formula says of the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import LinearRecurrence, reference, token_shards
from ejkernel.planning.token_shards import TokenShards

WHOLE = TokenShards(axes=(), sizes=(), tokens=0)


def run(record):
    return reference(record)[0]


@pytest.mark.parametrize("tokens", [768, 5])
def test_shard_summary_maps_entering_state_to_final_state(tokens):
    """768 tokens are three matrix products; gates of -inf forget what was before."""
    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value = (jax.random.normal(k, (2, tokens, 2, 3)) for k in keys[:3])
    decay = -jnp.abs(jax.random.normal(keys[3], (2, tokens, 2, 3))) / 8
    decay = decay.at[0, 2, 1].set(-jnp.inf)
    state = jax.random.normal(keys[4], (2, 2, 3, 3))
    record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, decay=decay, initial_state=state)
    summary = token_shards.summary(run, record, token_shards.border_tokens(record, WHOLE))
    (_, final), _ = reference(record)
    np.testing.assert_allclose(summary.factor * state + summary.added, final, rtol=1e-4, atol=1e-5)


def test_shard_summary_with_step_sizes_and_shared_value_heads():
    """Each of four heads has a step of its own; two share a value."""
    keys = jax.random.split(jax.random.key(3), 4)
    query, key = (jax.random.normal(k, (1, 5, 4, 3)) for k in keys[:2])
    value, dt = jax.random.normal(keys[2], (1, 5, 2, 3)), jax.random.uniform(keys[3], (1, 5, 4))
    record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, dt=dt)
    summary = token_shards.summary(run, record, token_shards.border_tokens(record, WHOLE))
    (_, final), _ = reference(record)
    np.testing.assert_allclose(summary.added, final, rtol=1e-4, atol=1e-5)
    assert summary.factor.shape == (1, 4, 1, 1)


def test_summaries_without_a_delta_rule_take_the_states_that_a_kernel_computes_of_rows():
    keys = jax.random.split(jax.random.key(4), 4)
    query, key, value, cotangent = (jax.random.normal(k, (1, 5, 2, 3)) for k in keys)
    record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, decay=-jnp.ones((1, 1, 2, 1)))
    asked, border_tokens = [], token_shards.border_tokens(record, WHOLE)

    class Kernel:
        def row_states(self, record, output_cotangent, final_states_cotangent):
            assert final_states_cotangent is None
            asked.append((record, output_cotangent))
            return 7.0

    summary = token_shards.summary(Kernel(), record, border_tokens)
    gradient = token_shards.entering_state_gradient(Kernel(), record, border_tokens, cotangent, jnp.ones((1, 2, 3, 3)))
    assert (summary.added, [x is None for _, x in asked]) == (7.0, [True, False])
    np.testing.assert_allclose(summary.factor, np.exp(-5.0) * np.ones((1, 2, 1, 1)), rtol=1e-5)
    np.testing.assert_allclose(gradient, 7 + np.exp(-5.0) * np.ones((1, 2, 3, 3)), rtol=1e-5)
    np.testing.assert_array_equal(asked[1][1], cotangent)


def test_low_rank_terms_give_shard_summaries_a_matrix_factor():
    keys = jax.random.split(jax.random.key(2), 6)
    query, key, value, write, read = (jax.random.normal(k, (2, 5, 2, 3)) / 2 for k in keys[:5])
    state, decay = jax.random.normal(keys[5], (2, 2, 3, 3)), -jnp.abs(key)
    terms = {"decay": decay, "low_rank_write": write, "low_rank_read": read}
    record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, initial_state=state, **terms)
    borders = token_shards.border_tokens(record, WHOLE)
    summary = token_shards.summary(run, record, borders)
    (_, final), _ = reference(record)
    np.testing.assert_allclose(summary.factor @ state + summary.added, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strength", [1, 30])
def test_gradient_of_the_state_entering_a_shard(monkeypatch, strength):
    """Strong gates forget what is after the tokens that come first."""
    monkeypatch.setattr(token_shards, "GATED_TOKENS_AT_BORDER", 384)
    keys = jax.random.split(jax.random.key(1), 6)
    query, key, value, cotangent = (jax.random.normal(k, (1, 768, 2, 3)) for k in keys[:4])
    decay = -jnp.abs(jax.random.normal(keys[4], (1, 768, 2, 1))) / 32 * strength
    state = jax.random.normal(keys[5], (1, 2, 3, 3))
    record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, decay=decay, initial_state=state)

    def output(state):
        return reference(LinearRecurrence(**{**vars(record), "initial_state": state}))[0][0]

    (want,) = jax.vjp(output, state)[1](cotangent)
    got = token_shards.entering_state_gradient(run, record, token_shards.border_tokens(record, WHOLE), cotangent, None)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_float64_states_have_sums_of_float32_gates_in_float64(rows):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(5), 4)
        query, key, value = (jax.random.normal(k, (rows, 40, 2, 3), jnp.float64) for k in keys[:3])
        decay = -jnp.abs(jax.random.normal(keys[3], (rows, 40, 2, 1), jnp.float32))
        record = LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.5, decay=decay)
        summary = token_shards.summary(run, record, token_shards.border_tokens(record, WHOLE))
        (_, final), _ = reference(record)
    np.testing.assert_allclose(summary.added, final, rtol=1e-12)
