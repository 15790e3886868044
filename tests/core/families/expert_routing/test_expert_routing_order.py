"""The order of logits, against an order of Python numbers: zeros, infinities and NaNs of both signs, and ties."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import expert_routing

SPECIAL = np.array([-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-7, -1e-7])


def expected(logits, top_k):
    """Experts by the documented order, one token at a time."""

    def rank(pair):
        index, value = pair
        return (not math.isnan(value), 0 if math.isnan(value) else -value, index)

    return [[index for index, _ in sorted(enumerate(row), key=rank)[:top_k]] for row in logits.tolist()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_negative_and_positive_zero_logits_are_equal(dtype):
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.choice(SPECIAL, (64, 12)), dtype)
    experts = expert_routing(logits, 12)[0]
    assert experts.tolist() == expected(np.asarray(logits, np.float64), 12)


def test_negative_nan_logits_rank_as_nan():
    bits = jnp.array([[0x7F800000, 0xFFC00001, 0x7FC00000, 0xFF800001]], jnp.uint32)
    logits = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert expert_routing(logits, 4)[0].tolist() == [[1, 2, 3, 0]]
