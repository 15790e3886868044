"""Cumulative sums of the gates of many tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.split_recurrence import TOKENS_PER_SUM, cumulative_sums


@pytest.mark.parametrize("tokens", [1, TOKENS_PER_SUM, TOKENS_PER_SUM + 1, 3 * TOKENS_PER_SUM])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sums_include_all_tokens_so_far(tokens, reverse):
    x = -np.random.default_rng(0).exponential(size=(2, tokens, 3))
    x[0, tokens // 2] = -np.inf
    in_order = slice(None, None, -1 if reverse else 1)

    sums = cumulative_sums(jnp.asarray(x, jnp.float32), reverse=reverse)

    np.testing.assert_allclose(sums, np.cumsum(x[:, in_order], axis=1)[:, in_order], rtol=1e-5)


def test_cumulative_sums_on_gpu_use_short_reduction_windows():
    lowered = jax.jit(cumulative_sums).trace(jnp.zeros((1, 1 << 16, 4))).lower(lowering_platforms=("cuda",)).as_text()

    windows = re.findall(r"window_dimensions = array<i64: ([\d, ]+)>", lowered)
    assert windows
    assert max(np.prod([int(n) for n in window.split(",")]) for window in windows) <= TOKENS_PER_SUM
