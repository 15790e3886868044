"""Softmaxes over disjoint keys are joined to the softmax over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.planning.softmax_merge import PartialAttention, merge

GENERATOR = np.random.default_rng(0)
SCORES, VALUES = GENERATOR.normal(size=(2, 3, 4, 10)), GENERATOR.normal(size=(2, 3, 10, 5))


def attend(scores, values):
    """In float64; rows without keys are 0, and have lse -inf."""
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(axis=-1)
    output = (weights @ values) / np.where(total > 0, total, 1)[..., None]
    lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + largest[..., 0], -np.inf)
    return PartialAttention(output.swapaxes(1, 2), lse)


@pytest.mark.parametrize("offset", [0.0, 300.0], ids=["", "beyond exp in float32"])
@pytest.mark.parametrize("cuts", [(4,), (3, 7)])
def test_merging_partial_softmaxes_gives_the_full_softmax(cuts, offset):
    scores = SCORES + offset
    scores[0, 0, 0] = -np.inf  # attends to nothing
    scores[1, 1, 1, : cuts[0]] = -np.inf  # and to nothing of the first part
    parts = [attend(s, v) for s, v in zip(np.split(scores, cuts, -1), np.split(VALUES, cuts, 2), strict=True)]
    output, lse = jax.jit(merge)(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parts))
    expected = attend(scores, VALUES)
    np.testing.assert_allclose(output, expected.output, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-6, atol=1e-5)
