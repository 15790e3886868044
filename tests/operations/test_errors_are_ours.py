"""What nobody can do is said in words about the call, not in JAX's about its insides."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention, gla_attention, grouped_matmul

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


@pytest.mark.parametrize("shape", ["b, 16, 2, 8", "1, s, 2, 8"])
def test_symbolic_dimensions_are_refused_by_their_argument(shape):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"flash_attention: .* symbolic dimensions in query"):
        jax.export.export(jax.jit(attend))(x)


def test_a_symbolic_batch_is_exported_where_the_kernels_allow():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16, 2, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: gla_attention(x, x, x, -x)))(x)

    for batch in (1, 3):
        given = jnp.broadcast_to(X, (batch, 16, 2, 8))
        assert jnp.allclose(exported.call(given), gla_attention(given, given, given, -given), atol=1e-5)


def test_groups_of_more_rows_than_there_are_are_refused():
    lhs, rhs = jnp.ones((8, 16)), jnp.ones((2, 16, 4))
    for sizes in (jnp.array([3, 15]), [3, 15]):
        with pytest.raises(ValueError, match="group_sizes: got a sum of 18, wants at most the 8 rows of lhs"):
            grouped_matmul(lhs, rhs, jnp.asarray(sizes))
    assert grouped_matmul(lhs, rhs, jnp.array([3, 4])).shape == (8, 4)
    assert jax.jit(grouped_matmul)(lhs, rhs, jnp.array([3, 4])).shape == (8, 4)
