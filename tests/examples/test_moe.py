"""The expert layer of `examples/moe.py` against one that multiplies every token with every expert."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "moe.py"


@pytest.fixture(scope="module")
def moe():
    described = importlib.util.spec_from_file_location("moe", FILE)
    module = importlib.util.module_from_spec(described)
    sys.modules["moe"] = module
    described.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(moe):
    layer = moe.init(jax.random.key(0), experts=8, size=16, inner=8, top_k=2)
    # A router that prefers the first experts, so that some get many tokens and others none.
    router = layer.router.at[:, 0].add(0.5).at[:, 6:].set(-9.0)
    return dataclasses.replace(layer, router=router), jnp.abs(jax.random.normal(jax.random.key(1), (24, 16)))


def dense(moe, layer, tokens):
    to = moe.route(layer, tokens)
    gate, up = jnp.split(jnp.einsum("td,edf->tef", tokens, layer.gate_up), 2, axis=-1)
    made = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, layer.down)
    chosen = jnp.take_along_axis(made, to.experts[..., None], axis=1)
    return jnp.einsum("tkd,tk->td", chosen, to.weights)


def passes(call, layer, tokens):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(call(*x) ** 3), argnums=(0, 1)))(layer, tokens)


LAYERS = [
    (1, False, 0),
    (1, True, 0),
    *(pytest.param(2, *rest, marks=pytest.mark.needs("2 devices")) for rest in [(True, 48), (False, 46), (True, 45)]),
    pytest.param(4, False, 0, marks=pytest.mark.needs("4 devices")),
]


@pytest.mark.parametrize(("devices", "gathers", "rows"), LAYERS)
def test_output_and_gradients_are_those_of_the_dense_layer(moe, inputs, devices, gathers, rows, monkeypatch):
    monkeypatch.setattr(moe, "gathers", lambda layer: gathers)
    # With two devices tokens travel. The first has 46 of the 48 rows, so that 45 set aside are one too few.
    monkeypatch.setattr(moe, "set_aside", lambda devices, pairs: rows)
    call = moe.moe
    if devices > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("experts",))
        call = lambda *x: moe.sharded(mesh, "experts", *x)  # noqa: E731
    want = passes(lambda *x: dense(moe, *x), *inputs)
    got = passes(call, *inputs)
    np.testing.assert_allclose(jax.jit(call)(*inputs), dense(moe, *inputs), rtol=1e-4, atol=1e-4)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def pairs_of(call, pairs):
    return lambda moe, x, order, inverse: call(moe)(x, order, inverse.reshape(pairs))


CALLS = {
    "permute": (3, pairs_of(lambda moe: moe.permute, (3,))),
    "dispatch": (3, pairs_of(lambda moe: moe.dispatch, (3, 1))),
    "combine": (3, pairs_of(lambda moe: lambda x, *pair: moe.combine(x, jnp.ones((3, 1)), *pair), (3, 1))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_of_a_gather_is_no_scatter(moe, name):
    rows, call = CALLS[name]
    order = jnp.array([2, 0, 1])
    inverse = jnp.argsort(order)
    loss = jax.jit(jax.grad(lambda x: jnp.sum(call(moe, x, order, inverse) ** 2)))
    text = loss.lower(jnp.ones((rows, 4))).as_text()
    assert "stablehlo.gather" in text
    assert "stablehlo.scatter" not in text
