"""`gated_grouped_matmul`: its meaning beside the calls that it takes the place of, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import gated_grouped_matmul, grouped_matmul

SIZES = jnp.array([7, 0, 12])
KEYS = jax.random.split(jax.random.key(0), 3)
TOKENS = jax.random.normal(KEYS[0], (9, 8))
MATRICES = jax.random.normal(KEYS[1], (3, 8, 10))
INDICES = jax.random.randint(KEYS[2], (21,), 0, 9)


@pytest.mark.parametrize(("activation", "act"), [("silu", jax.nn.silu), ("gelu", jax.nn.gelu)])
def test_output_is_that_of_three_grouped_matmuls(activation, act):
    gate, other = jnp.split(grouped_matmul(TOKENS[INDICES], MATRICES, SIZES), 2, axis=1)
    got = gated_grouped_matmul(TOKENS, MATRICES, SIZES, INDICES, activation=activation)
    np.testing.assert_allclose(got, act(gate) * other, rtol=1e-5, atol=1e-5)
    assert not got[19:].any(), "rows of no group"
    rows = gated_grouped_matmul(TOKENS[INDICES], MATRICES, SIZES, activation=activation)
    np.testing.assert_allclose(rows, got, rtol=1e-5, atol=1e-5)


def test_a_row_of_no_token_brings_in_nothing():
    tokens = TOKENS.at[0].set(jnp.nan)
    got = gated_grouped_matmul(tokens, MATRICES, SIZES, jnp.array([-1, 9, 3] + [1] * 18))
    assert not got[:2].any()
    assert jnp.isfinite(got).all()


@pytest.mark.parametrize(
    ("match", "wrong"),
    [
        ("rhs", {"rhs": MATRICES[..., :9]}),
        ("rhs", {"rhs": MATRICES.astype(jnp.bfloat16)}),
        ("group_sizes", {"group_sizes": SIZES[:2]}),
        ("indices", {"indices": INDICES.astype(jnp.float32)}),
        ("activation", {"activation": "relu"}),
        ("left_over", {"left_over": "nan"}),
    ],
)
def test_wrong_arguments_are_refused_by_name(match, wrong):
    given = {"lhs": TOKENS, "rhs": MATRICES, "group_sizes": SIZES, "indices": INDICES, **wrong}
    with pytest.raises(ValueError, match=match):
        gated_grouped_matmul(**given)
