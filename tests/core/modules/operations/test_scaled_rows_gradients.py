"""Gradients of rows with scales where the groups with matrices are neither the first rows nor all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as ej

ROWS, CONTRACTED, COLUMNS = 40, 8, 4
SIZES = (17, 6, 0, 12)


def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    lhs = jax.random.normal(keys[0], (ROWS, CONTRACTED))
    scale = jax.random.uniform(keys[1], (ROWS, 2), minval=0.5)
    rhs = jax.random.normal(keys[2], (2, CONTRACTED, COLUMNS))
    return lhs, scale, rhs, jax.random.normal(keys[3], (ROWS, COLUMNS))


@pytest.mark.parametrize("offset", [1, 2])
def test_rows_of_later_groups_have_gradients(offset):
    lhs, scale, rhs, cotangent = inputs()
    ends = np.cumsum(SIZES)

    def loss(lhs, scale):
        out = ej.grouped_matmul(
            lhs, rhs, jnp.array(SIZES, jnp.int32), group_offset=offset, lhs_scale=scale, platform="xla"
        )
        return jnp.sum(out * cotangent)

    got_lhs, got_scale = jax.jit(jax.grad(loss, (0, 1)))(lhs, scale)
    want_rows = np.zeros((ROWS, CONTRACTED))
    for matrix, group in enumerate((offset, offset + 1)):
        part = slice(ends[group] - SIZES[group], ends[group])
        want_rows[part] = np.asarray(cotangent[part], np.float64) @ np.asarray(rhs[matrix], np.float64).T
    shares = (want_rows * np.asarray(lhs)).reshape(ROWS, 2, -1).sum(axis=-1)
    np.testing.assert_allclose(got_scale, shares, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_lhs, want_rows * np.repeat(scale, CONTRACTED // 2, axis=1), rtol=1e-5, atol=1e-5)
