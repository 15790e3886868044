"""Packed sequences of the selective scan share nothing, whatever A is and however large their states are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import state_space_v1

BOUNDS = jnp.array([0, 5, 5, 70, 77])
CHANNELS, SIZE = 6, 4


def call(A, states, tokens, **more):
    x, B, C, dt = tokens
    return state_space_v1(x, A, B, C, jnp.ones(CHANNELS), dt, initial_state=states, cu_seqlens=BOUNDS, **more)[:2]


def inputs():
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = (CHANNELS, SIZE, SIZE, CHANNELS)
    x, B, C, dt = (jax.random.normal(key, (1, 77, n)) for key, n in zip(keys, sizes, strict=False))
    states = jax.random.normal(keys[4], (4, CHANNELS, SIZE))
    return -jnp.ones((CHANNELS, SIZE)), states, (x, B, C, jax.nn.softplus(dt - 2))


def alone(A, states, tokens, n):
    """A sequence without the others."""
    part = slice(int(BOUNDS[n]), int(BOUNDS[n + 1]))
    x, B, C, dt = (token[:, part] for token in tokens)
    return state_space_v1(x, A, B, C, jnp.ones(CHANNELS), dt, initial_state=states[None, n])[:2]


@pytest.mark.parametrize("rate", [0.0, 0.5, -1.0])
def test_states_do_not_leak_into_the_next_sequence_at_any_decay(rate):
    """With A of 0 nothing decays, and with A above 0 states grow."""
    A, states, tokens = inputs()
    output, final = call(A + 1 + rate, states, tokens)
    for n in (0, 2, 3):
        want, last = alone(A + 1 + rate, states, tokens, n)
        np.testing.assert_allclose(output[:, int(BOUNDS[n]) : int(BOUNDS[n + 1])], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(final[n], last[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(final[1], states[1])


@pytest.mark.parametrize("size", [1e21, 1e30])
def test_large_states_stay_finite(size):
    A, states, tokens = inputs()
    output, final = call(A, size * states, tokens)
    want, last = alone(A, size * states, tokens, 3)
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output[:, 70:], want, rtol=1e-4)
    np.testing.assert_allclose(final[3], last[0], rtol=1e-4)
    np.testing.assert_array_equal(final[1], size * states[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_state_in_a_slot_reaches_its_sequence_alone(value):
    A, states, tokens = inputs()
    indices = jnp.array([3, 0, 2, 1])

    def total(states):
        output, final = call(A, states, tokens, state_indices=indices)
        spared = (
            jnp.sin(output[:, :5]).sum(),
            jnp.sin(output[:, 70:]).sum(),
            jnp.sin(final[jnp.array([0, 1, 3])]).sum(),
        )
        return sum(spared), (output, final)

    grad = jax.grad(total, has_aux=True)
    (clean, (output, final)), (dirty, (bad, changed)) = grad(states), grad(states.at[2].set(value))
    spared = np.array([0, 1, 3])
    np.testing.assert_array_equal(changed[spared], final[spared])
    np.testing.assert_array_equal(dirty[spared], clean[spared])
    for part in (slice(0, 5), slice(70, 77)):
        np.testing.assert_array_equal(bad[:, part], output[:, part])
