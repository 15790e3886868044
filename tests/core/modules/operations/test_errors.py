"""What nobody can do is said in words about the call, not in JAX's about its insides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import blocksparse_attention, flash_attention, gated_delta_rule, gla_attention, grouped_matmul
from ejkernel.types.sparse_masks import CausalMask, LocalMask

X = jnp.ones((1, 16, 2, 8))


def attend(x):
    return flash_attention(x, x, x, causal=True)


@pytest.mark.parametrize("derive", [lambda: jax.jvp(attend, (X,), (X,)), lambda: jax.jacfwd(attend)(X)])
def test_a_forward_mode_derivative_names_the_operation(derive):
    with pytest.raises(NotImplementedError, match="flash_attention has no forward-mode derivative"):
        derive()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_are_refused_by_their_dtype(dtype):
    x = X.astype(dtype)
    with pytest.raises(NotImplementedError, match=f"dtype {dtype} is not among"):
        flash_attention(x, x, x)


@pytest.mark.parametrize("run", [lambda function, *args: function(*args), explain])
def test_eight_bit_floats_that_jax_does_not_promote_are_named(run):
    x, beta = X.astype("float8_e4m3fn"), X[..., 0]
    message = "query, key, value: got float8_e4m3fn, gated_delta_rule wants floats of 16 bits or more in this call"
    with pytest.raises(NotImplementedError, match=message):
        run(gated_delta_rule, x, x, x, beta, beta)


def gradient(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(attend(x))))(x)


def recur(x):
    return gla_attention(x, x, x, -x)


def exported(function, shape):
    return jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32))


@pytest.mark.parametrize("function", [attend, gradient, recur], ids=["attention", "gradient", "recurrence"])
def test_batch_and_length_are_exported_as_symbols_by_xla(function):
    program = exported(function, "b, s, 2, 8")
    for batch, length in ((1, 1), (3, 21)):
        given = jax.random.normal(jax.random.key(0), (batch, length, 2, 8))
        np.testing.assert_allclose(program.call(given), function(given), atol=1e-5)


def test_symbolic_keys_of_another_length_with_everything_that_has_them():
    b, t, s = jax.export.symbolic_shape("b, t, s")

    def call(query, key, bias):
        rest = {"softmax_aux": jnp.ones(4), "dropout_prob": 0.1, "dropout_seed": 1, "sliding_window": (9, 3)}
        return flash_attention(query, key, key, bias, **rest)

    shapes = ((b, t, 4, 8), (b, s, 2, 8), (1, 1, 1, s))
    program = jax.export.export(jax.jit(call))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    given = [jax.random.normal(jax.random.key(1), shape) for shape in ((2, 9, 4, 8), (2, 33, 2, 8), (1, 1, 1, 33))]
    np.testing.assert_allclose(program.call(*given), call(*given), atol=1e-5)


def test_symbolic_sizes_are_refused_by_name_where_they_do_not_serve():
    def pinned(x):
        return flash_attention(x, x, x, platform="triton")

    def patterned(x):
        return blocksparse_attention(
            x, x, x, mask_builder=lambda *_: LocalMask((16, 16), (3, 0)) & CausalMask((16, 16))
        )

    with pytest.raises(NotImplementedError, match=r"triton .*sizes of query, key, value are symbolic"):
        exported(pinned, "b, 16, 2, 8")
    with pytest.raises((ValueError, NotImplementedError), match=r"wants \[T=s|symbolic"):
        exported(patterned, "1, 2, s, 8")


def test_groups_of_more_rows_than_there_are_are_refused():
    lhs, rhs = jnp.ones((8, 16)), jnp.ones((2, 16, 4))
    for sizes in (jnp.array([3, 15]), [3, 15]):
        with pytest.raises(ValueError, match=r"group_sizes: got \[ 3, 15\], wants a sum of at most the 8 rows of lhs"):
            grouped_matmul(lhs, rhs, jnp.asarray(sizes))
    assert grouped_matmul(lhs, rhs, jnp.array([3, 4])).shape == (8, 4)
    assert jax.jit(grouped_matmul)(lhs, rhs, jnp.array([3, 4])).shape == (8, 4)
