"""Tests of suite/draws.py: what tests draw is what JAX draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import draws

KEY = jax.random.key(3)
SHAPES = ((), (1,), (7,), (3, 5, 2), (8, 16), (129,))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_drawn_floats_equal_those_of_jax(name: str, dtype: type) -> None:
    replaced = getattr(jax.random, name)
    assert replaced.__module__ == draws.__name__
    for shape in SHAPES:
        got, want = replaced(KEY, shape, dtype), replaced.__wrapped__(KEY, shape, dtype)
        assert got.aval == want.aval
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
def test_drawn_integers_equal_those_of_jax(dtype: type) -> None:
    replaced = jax.random.randint
    for shape in SHAPES:
        got, want = replaced(KEY, shape, -3, 90, dtype), replaced.__wrapped__(KEY, shape, -3, 90, dtype)
        assert got.aval == want.aval
        np.testing.assert_array_equal(got, want)


def test_a_traced_draw_is_left_to_jax() -> None:
    want = jax.random.normal.__wrapped__(KEY, (5,))
    np.testing.assert_allclose(jax.jit(lambda: jax.random.normal(KEY, (5,)))(), want, rtol=1e-6)
    keys = jax.random.split(KEY, 2)
    assert jax.vmap(lambda key: jax.random.normal(key, (5,)))(keys).shape == (2, 5)
    assert jax.eval_shape(lambda: jax.random.normal(KEY, (5,))).shape == (5,)


def test_a_donated_draw_leaves_the_next_as_it_is() -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    first = np.array(jax.random.normal(KEY, (64,)))
    add(jax.random.normal(KEY, (64,)))
    np.testing.assert_array_equal(jax.random.normal(KEY, (64,)), first)
