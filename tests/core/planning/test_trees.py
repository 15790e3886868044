"""Rows that are read along trees of draft tokens, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.planning.trees import rows_with_ordered_gradients


def _both(x, index):
    """Returns the gradients of `rows_with_ordered_gradients` and of indexing, for the same cotangent."""
    cotangent = jax.random.normal(jax.random.key(1), (len(index), x.shape[1]), x.dtype)
    return [
        jax.vjp(function, x)[1](cotangent)[0]
        for function in (lambda x: rows_with_ordered_gradients(x, index), lambda x: x[index])
    ]


@pytest.mark.parametrize("index", [[0, 0, 2, 0, 2, 5], [3], [1, 1, 1, 1]])
def test_gradient_of_a_gathered_row_sums_over_all_its_uses(index):
    x, index = jax.random.normal(jax.random.key(0), (6, 3)), jnp.asarray(index, jnp.int32)
    np.testing.assert_array_equal(rows_with_ordered_gradients(x, index), x[index])
    got, expected = _both(x, index)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_gradient_of_gathered_rows_uses_no_scatter_add():
    """On a GPU a scatter adds in any order, so that two runs of the convolution over trees differed in their bits."""
    shapes = jnp.zeros((6, 3)), jnp.zeros(9, jnp.int32)
    program = str(jax.make_jaxpr(jax.grad(lambda x, index: rows_with_ordered_gradients(x, index).sum()))(*shapes))
    assert "scatter" not in program
    assert "scatter-add" in str(jax.make_jaxpr(jax.grad(lambda x, index: x[index].sum()))(*shapes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradient_of_gathered_rows_is_rounded_once(dtype):
    """Sums of bfloat16 are those of float32; sums of float64 keep its digits."""
    index = np.repeat([0, 2], [300, 41])
    with jax.enable_x64(dtype == "float64"):
        cotangent = jnp.asarray(np.random.default_rng(0).uniform(size=(len(index), 16)), dtype)
        expected = np.stack([np.asarray(cotangent, np.float64)[index == row].sum(0) for row in range(3)])
        _, pull = jax.vjp(lambda x: rows_with_ordered_gradients(x, jnp.asarray(index)), jnp.ones((3, 16), dtype))
        (got,) = pull(cotangent)
        assert got.dtype == dtype
        if dtype == "bfloat16":
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
        np.testing.assert_allclose(got, expected, rtol=1e-14 if dtype == "float64" else 2**-8)


def test_nan_in_a_cotangent_reaches_only_the_gathered_row():
    index, cotangent = jnp.asarray([0, 1, 0, 2, 1]), jnp.ones((5, 3)).at[2, 1].set(jnp.nan)
    (got,) = jax.vjp(lambda x: rows_with_ordered_gradients(x, index), jnp.zeros((4, 3)))[1](cotangent)
    np.testing.assert_array_equal(got, [[2, np.nan, 2], [2] * 3, [1] * 3, [0] * 3])
