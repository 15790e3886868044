"""The log decay of delta attention, with and without a bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import kda_decay


def test_a_bounded_decay_is_its_formula() -> None:
    gate, log, bias = (
        jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, 5, 3, 4), (3,), (3, 4)])
    )
    want = -5.0 / (1 + np.exp(-np.exp(np.asarray(log))[:, None] * (np.asarray(gate) + np.asarray(bias))))
    np.testing.assert_allclose(kda_decay(gate, log, bias, lower_bound=-5.0), want, rtol=1e-5)
    stored = kda_decay(gate, log.reshape(1, 1, 3, 1), bias.reshape(-1), lower_bound=-5.0)
    np.testing.assert_allclose(stored, want, rtol=1e-5)
    per_head = kda_decay(gate[..., 0], log, bias[:, 0], lower_bound=-5.0)
    np.testing.assert_allclose(per_head, want[..., 0], rtol=1e-5)


def test_a_bounded_decay_never_passes_its_bound() -> None:
    gate = jnp.array([[-1e4, 0.0, 1e4]]).T
    np.testing.assert_allclose(kda_decay(gate, jnp.zeros(1), jnp.zeros(1), -2.0)[:, 0], [0.0, -1.0, -2.0])


def test_a_bound_is_negative() -> None:
    with pytest.raises(ValueError, match="lower_bound: got 5"):
        kda_decay(jnp.zeros((1, 2)), jnp.zeros(2), jnp.zeros(2), lower_bound=5.0)
