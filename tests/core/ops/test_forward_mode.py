"""Forward mode gives the derivatives of the formula, in every composition with reverse mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention, fused_cross_entropy, gated_delta_rule, gla_attention, grouped_matmul
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import reference as flash_reference
from ejkernel.ops import forward_mode, second_derivatives

KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (1, 6, 2, 8))
W = 0.3 * jax.random.normal(KEYS[1], (8, 8))
V = jnp.cos(X)


def attend(x, y=None):
    return flash_attention(x, (x if y is None else y) @ W, x - 1, causal=True)


def plainly(x, y=None):
    key = (x if y is None else y) @ W
    return flash_reference(FlashAttentionArguments(query=x, key=key, value=x - 1, causal=True))


def loss(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def batch(f):
    return lambda x: jax.vmap(f, in_axes=(0, None))(jnp.stack([x, V]), x)


def stack(f):
    return lambda x: jax.lax.scan(lambda x, _: (jax.checkpoint(f)(x), None), x, None, length=2)[0]


MODES = {
    "jvp": lambda f: jax.jvp(f, (X,), (V,)),
    "transpose": lambda f: jax.linear_transpose(jax.linearize(f, X)[1], X)(V),
    "jacfwd": lambda f: jax.jacfwd(lambda x: f(x)[..., 0])(X),
    "vmap": lambda f: jax.grad(loss(batch(f)))(X),
    "scan": lambda f: jax.value_and_grad(loss(stack(f)))(X),
    "forward over reverse": lambda f: jax.jvp(jax.grad(loss(stack(f))), (X,), (V,)),
    "reverse over forward": lambda f: jax.grad(lambda x, v: jax.jvp(loss(f), (x,), (v,))[1] ** 2, argnums=(0, 1))(X, V),
    "reverse over jacfwd": lambda f: jax.grad(loss(jax.jacfwd(lambda x: f(x)[0, :, 0, 0])))(X),
    "reverse over forward of a batch": lambda f: jax.grad(lambda x: jax.jvp(loss(batch(f)), (x,), (V,))[1])(X),
    "forward over linearize": lambda f: jax.jvp(lambda x: jax.linearize(f, x)[1](V), (X,), (V,)),
    "hessian": lambda f: jax.hessian(lambda c: loss(f)(X + c * V))(0.5),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_composition_is_that_of_the_formula(mode):
    with forward_mode():
        got = jax.jit(lambda: MODES[mode](attend))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(lambda: MODES[mode](plainly))()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def attend_with_everything(x):
    bias = jnp.einsum("bthd,bshd->bhts", x, jnp.sin(x))
    options = {"softmax_aux": x[0, 0, :, 0], "logits_soft_cap": 3.0, "sliding_window": (3, 1)}
    output, lse = flash_attention(x, x[:, :, :1], x[:, :, 1:], bias=bias, **options, return_lse=True)
    return output * lse.swapaxes(1, 2)[..., None]


def attend_with_function(x, slopes, factors):
    def score_mod(score, b, h, q, k):
        return jnp.where(k == 3, -jnp.inf, score * jnp.sin(slopes[h]) * factors[h] - slopes[h] * (q - k) ** 2)

    return flash_attention(x, x @ W, x, score_mod=score_mod)


def in_segments(x):
    """Returns ids of segments with padding in the middle, and the state from which the first one continues."""
    return {"seg_ids": jnp.array([[0, 0, -1, 1, 1, 0]]), "initial_state": jnp.einsum("bthk,bthv->bhkv", x, jnp.cos(x))}


CALLS = {
    "attention": attend_with_everything,
    "packed": lambda x: flash_attention(x, x @ W, x, causal=True, cum_seqlens_q=jnp.array([0, 2, 6])),
    "numerator": lambda x: flash_attention(x, x @ W, x, normalize_output=False),
    "function of scores": lambda x: attend_with_function(x, x[0, 0, :, 0], jnp.array([1, 2])),
    "gla": lambda x: gla_attention(x, jnp.sin(x), x, -(x**2)),
    "delta rule": lambda x: gated_delta_rule(x, x, x, -(x[..., 0] ** 2), jax.nn.sigmoid(x[..., 1])),
    "gla of segments": lambda x: gla_attention(x, jnp.sin(x), x, -(x**2), **in_segments(x), return_state=True)[0],
    "delta rule of segments": lambda x: gated_delta_rule(
        x, x, x, -(x[..., 0] ** 2), jax.nn.sigmoid(x[..., 1]), **in_segments(x)
    ),
    "loss of a head": lambda x: (
        fused_cross_entropy(hidden=x.reshape(12, 8), lm_head_weight=x[0, :, 0].T, targets=jnp.arange(12) % 6).loss
    ),
    "experts": lambda x: grouped_matmul(x.reshape(12, 8), jnp.stack([W, W.T]) * x[0, 0, 0, 0], jnp.array([5, 7])),
}


@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_finite_differences_and_gradients_their_transpose(name):
    with jax.enable_x64(True), forward_mode():
        f, x, v, step = CALLS[name], X.astype(jnp.float64), V.astype(jnp.float64), 1e-6

        @jax.jit
        def run(x, v):
            (output, tangent), (value, pull) = jax.jvp(f, (x,), (v,)), jax.vjp(f, x)
            cotangent = jnp.sin(1.0 + value)
            return output, tangent, jnp.vdot(tangent, cotangent), jnp.vdot(pull(cotangent)[0], v)

        _, tangent, forwards, backwards = run(x, v)
        ends = [np.asarray(run(x + sign * step * v, v)[0]) for sign in (1, -1)]
    np.testing.assert_allclose(tangent, (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-7)
    np.testing.assert_allclose(forwards, backwards, rtol=1e-9)


@pytest.mark.parametrize("name", ["gla of segments", "delta rule of segments", "loss of a head"])
def test_second_derivatives_are_finite_differences_of_gradients(name):
    with jax.enable_x64(True), forward_mode():
        f, x, v, step = loss(CALLS[name]), X.astype(jnp.float64), V.astype(jnp.float64), 1e-6

        @jax.jit
        def run(x, v):
            gradient, forward_over_reverse = jax.jvp(jax.grad(f), (x,), (v,))
            return gradient, forward_over_reverse, jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x)

        _, *second = run(x, v)
        ends = [np.asarray(run(x + sign * step * v, v)[0]) for sign in (1, -1)]
    for each in second:
        np.testing.assert_allclose(each, (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-7)


MEMORY_CALLS = {
    "attention": lambda x: flash_attention(x, x, x),
    "recurrence of segments": lambda x: gla_attention(
        x, x, x, -(x**2), seg_ids=jnp.arange(x.shape[1], dtype=jnp.int32)[None] // 100 - 1
    ),
}


@pytest.mark.parametrize("name", MEMORY_CALLS)
def test_memory_is_linear_in_the_length(name):
    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        curvature = jax.grad(lambda x: jnp.sum(MEMORY_CALLS[name](x) ** 2))
        with forward_mode():
            program = jax.jit(lambda x, v: jax.jvp(curvature, (x,), (v,))).lower(x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) < 2.5 * temporary_bytes(4096)


@pytest.mark.parametrize("tangents_of", ["some_kernel", "limited_kernel", "no_tangents"])
def test_a_kernel_has_the_second_derivatives_of_xla(monkeypatch, tangents_of):
    """As XLA's passes would if they were a kernel's, with tangents of its own, with limits, or without."""
    from ejkernel.ops.plugins import registry

    found = registry()
    xla = next(i for i in found.implementations["flash_attention"] if i.name == "xla")
    kernel = dataclasses.replace(xla, name=tangents_of, platform="triton", priority=100, package="nobody")
    if tangents_of == "limited_kernel":
        kernel = dataclasses.replace(kernel, forward_mode_limits=lambda record, fields: fields & {"query"})
    if tangents_of == "no_tangents":
        kernel = dataclasses.replace(kernel, forward_mode=None)
    kernels = (kernel, *found.implementations["flash_attention"])
    found = dataclasses.replace(found, implementations={**found.implementations, "flash_attention": kernels})
    monkeypatch.setattr("ejkernel.ops.dispatch.registry", lambda: found)
    source = tangents_of if tangents_of == "some_kernel" else "xla"
    with forward_mode():
        decision = explain(flash_attention, X, X, X)
        assert decision.forward.implementation.name == tangents_of
        assert f"forward mode: tangents and output by the forward_mode function of {source}" in decision.forward.notes
        for mode in ("jvp", "forward over reverse", "reverse over forward"):
            got = jax.tree.leaves(MODES[mode](attend))
            for a, b in zip(got, jax.tree.leaves(MODES[mode](plainly)), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_more_than_one_reverse_needs_the_other_block():
    twice = jax.grad(lambda x: jnp.sum(jax.grad(loss(attend))(x) ** 2))
    with forward_mode():
        with pytest.raises(NotImplementedError, match="second_derivatives"):
            twice(X)
        with second_derivatives():
            got = twice(X)
            tangent = jax.jvp(attend, (X,), (V,))[1]
    want = jax.grad(lambda x: jnp.sum(jax.grad(loss(plainly))(x) ** 2))(X)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(tangent, jax.jvp(plainly, (X,), (V,))[1], rtol=0, atol=1e-5)


def test_inside_of_the_callers_shard_map_gradients_are_summed_over_devices():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, both = jax.sharding.PartitionSpec("x"), jnp.concatenate([X, V])

    def on_device(x, w):
        return flash_attention(x, x @ w, x, causal=True)

    def curvature(f):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(f(both, w))))
        return jax.jit(lambda: jax.jvp(gradient, (W,), (jnp.cos(W),)))()

    with forward_mode():
        specs = {"in_specs": (rows, jax.sharding.PartitionSpec()), "out_specs": rows}
        got, want = curvature(jax.shard_map(on_device, mesh=mesh, **specs)), curvature(on_device)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_outside_of_the_block_the_message_names_it():
    with pytest.raises(NotImplementedError, match=r"flash_attention has no forward-mode derivative .*forward_mode\(\)"):
        jax.jvp(attend, (X,), (V,))
