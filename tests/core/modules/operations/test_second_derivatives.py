"""Second derivatives are right where they are asked for, and refused by name where they are not."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention, gated_delta_rule, gla_attention, grouped_matmul, mean_pooling
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import reference as flash_reference
from ejkernel.ops import second_derivatives

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (1, 6, 2, 8))
W = 0.3 * jax.random.normal(KEYS[1], (8, 8))


def attend(x):
    return flash_attention(x, x @ W, x - 1, causal=True)


def attend_with_lse(x):
    output, lse = flash_attention(x, x @ W, x - 1, causal=True, softmax_aux=x[0, 0, :, 0], return_lse=True)
    return output * lse.swapaxes(1, 2)[..., None]


def plainly(x):
    args = FlashAttentionArguments(query=x, key=x @ W, value=x - 1, causal=True)
    return flash_reference(args)


def plainly_with_lse(x):
    args = {"query": x, "key": x @ W, "value": x - 1, "causal": True, "softmax_aux": x[0, 0, :, 0]}
    output, lse = flash_reference(FlashAttentionArguments(**args, return_lse=True))
    return output * lse.swapaxes(1, 2)[..., None]


def loss(attention):
    return lambda x: jnp.sum(jnp.sin(attention(x)))


def squared_gradient(attention):
    return lambda x: jnp.sum(jax.grad(loss(attention))(x) ** 2)


ORDERS = {
    "backwards twice": lambda f: jax.grad(squared_gradient(f)),
    "forwards over backwards": lambda f: lambda x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),))[1],
    "hessian": lambda f: jax.hessian(loss(f)),
    "backwards thrice": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(squared_gradient(f))(x) ** 2)),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_in_a_block_are_those_of_the_formula(order, jit):
    derive = ORDERS[order]
    for ours, plain in ((attend, plainly), (attend_with_lse, plainly_with_lse)):
        function = jax.jit(derive(ours)) if jit else derive(ours)
        with second_derivatives():
            got = function(X)
        want = derive(plain)(X)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_the_hessian_of_xla_needs_no_block():
    np.testing.assert_allclose(jax.hessian(loss(attend))(X), jax.hessian(loss(plainly))(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_second_derivatives_outside_of_a_block_are_refused_by_name(jit):
    def both(x):  # the value too is differentiated again
        value, gradient = jax.value_and_grad(loss(attend))(x)
        return value + jnp.sum(gradient)

    for function in (squared_gradient(attend), both):
        with pytest.raises(NotImplementedError, match=r"flash_attention has no second derivative by xla: .*second_der"):
            jax.grad(jax.jit(function) if jit else function)(X)


def test_a_kernel_refuses_both_modes_by_name(monkeypatch):
    """As XLA's passes would if they were a kernel's."""
    from ejkernel.ops import second
    from ejkernel.ops.plugins import registry

    xla = next(i for i in registry().implementations["flash_attention"] if i.name == "xla")
    kernel = __import__("dataclasses").replace(xla, name="some_kernel", platform="triton")

    def run(x):
        return second.run_refusing_derivatives("flash_attention", kernel, jnp.sin, x)

    for derive in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="no second derivative by some_kernel"):
            derive(run)(1.0)
    assert run(jnp.float32(0)) == 0


def test_a_block_is_part_of_the_key_of_jitted_functions():
    function = jax.jit(jax.grad(squared_gradient(attend)))
    for block, refused in ((contextlib.nullcontext(), True), (second_derivatives(), False)):
        with block, pytest.raises(NotImplementedError) if refused else contextlib.nullcontext():
            function(X)


OTHERS = {
    "gla": lambda x: gla_attention(x, jnp.sin(x), x, -(x**2)),
    "delta rule": lambda x: gated_delta_rule(x, x, x, -(x[..., 0] ** 2), jax.nn.sigmoid(x[..., 1])),
    "experts": lambda x: grouped_matmul(x.reshape(12, 8), jnp.stack([W, W.T]), jnp.array([5, 7])),
    "pooling": lambda x: mean_pooling(x[..., 0, :], chunk_size=2) ** 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_agree_forwards_and_backwards(name):
    """Two ways to one number: a directional derivative of the gradient, and the gradient's own."""
    with second_derivatives():
        direction = jnp.cos(X)
        forwards = jax.jvp(squared_gradient(OTHERS[name]), (X,), (direction,))[1]
        backwards = jnp.vdot(jax.grad(squared_gradient(OTHERS[name]))(X), direction)
    step = 3e-3
    ends = [squared_gradient(OTHERS[name])(X + sign * step * direction) for sign in (1, -1)]
    np.testing.assert_allclose(forwards, backwards, rtol=1e-3)
    np.testing.assert_allclose(backwards, (ends[0] - ends[1]) / (2 * step), rtol=2e-2)
