import jax
import jax.numpy as jnp
import pytest

from ejkernel_conformance.constant_draws import constant_draws
from ejkernel_conformance.subjects import abstract_args

DRAWS = {
    "normal": lambda key: jax.random.normal(key, (2, 3)),
    "normal in a dtype": lambda key: jax.random.normal(key, (3,), jnp.bfloat16),
    "uniform": lambda key: jax.random.uniform(key, (4,), minval=-1.0, maxval=2.0),
    "integers": lambda key: jax.random.randint(key, (5,), 0, 7),
    "integers in a dtype": lambda key: jax.random.randint(key, (5,), 0, 7, jnp.int8),
    "one Boolean per probability": lambda key: jax.random.bernoulli(key, jnp.full((2, 2), 0.5)),
    "Booleans of a shape": lambda key: jax.random.bernoulli(key, 0.3, (6,)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_zeros_have_the_shape_and_dtype_of_the_random_numbers(draw):
    want = jax.eval_shape(draw, jax.random.key(0))
    with constant_draws():
        got = jax.eval_shape(lambda key: draw(key), jax.random.key(0))
    assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)


def test_a_compiled_function_does_not_keep_the_zeros():
    """JAX caches a traced function by itself and the shapes of its arguments."""
    draw = jax.jit(lambda key: jax.random.normal(key, (3,)))
    with constant_draws():
        jax.eval_shape(draw, jax.random.key(0))
    assert draw(jax.random.key(0)).any()


def test_random_numbers_are_back_after_shapes_were_asked_for():
    class Failing:
        def make(self, key):
            raise RuntimeError("no inputs")

    before = jax.random.normal
    with pytest.raises(RuntimeError, match="no inputs"):
        abstract_args(Failing())
    assert jax.random.normal is before
