"""Calls that drop weights and give no seed: seed 0, and one warning a process."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import attention, flash_attention, flash_mla
from ejkernel.modules.operations.shared import shapes

Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
W = jax.random.normal(jax.random.key(1), (8, 2, 8))
CALLS = {
    "flash_attention": lambda seed: flash_attention(Q, K, V, causal=True, dropout_prob=0.5, dropout_seed=seed),
    "attention": lambda rng: attention(Q, K, V, dropout_rng=rng, dropout_prob=0.5, deterministic=False),
    "flash_mla": lambda rng: flash_mla(
        Q, V[:, :, 0], W, W, dropout_rng=rng, dropout_prob=0.5, deterministic=False, causal=True
    ),
}


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not warned yet."""
    monkeypatch.setattr(shapes, "_warned_without_seed", set())


@pytest.mark.parametrize("name", CALLS)
def test_no_seed_means_seed_0_and_warns_once_a_process(name, fresh):
    with pytest.warns(UserWarning, match="every call drops the same pairs until a seed is given") as warned:
        got = CALLS[name](None)
    assert [entry.filename for entry in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, zero = CALLS[name](None), CALLS[name](0)
    jax.tree.map(np.testing.assert_array_equal, got, zero)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), got, CALLS[name](1))))


def test_nothing_dropped_needs_no_seed(fresh):
    flash_attention(Q, K, V)
    attention(Q, K, V, dropout_prob=0.5)


def test_a_call_with_a_seed_does_not_warn(fresh):
    jax.jit(CALLS["flash_attention"])(jnp.uint32(3))
