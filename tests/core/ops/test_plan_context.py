"""Passes that JAX traces after the blocks of their call have ended."""

import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from ejkernel.ops import batch_invariant, forward_mode, isolate_sequences, second_derivatives, target_device
from ejkernel.ops.active_policies import active_policies
from ejkernel.ops.device import DEVICES_BY_SHORT_NAME, current_device
from ejkernel.ops.model import load_object


@pytest.fixture
def contexts(use, monkeypatch):
    """What kernels and limits of an implementation see around them, by pass."""
    seen = []

    def spied(name, function):
        def run(*args):
            seen.append((name, current_device(), active_policies()))
            return function(*args)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(toy, name, spied(name, getattr(toy, name)))
    on_tpu = toy.implementation("traced_later", devices=frozenset({"tpu", "cpu"}), extra=spied("limit", lambda _: ()))
    use(toy.plugin(on_tpu))
    load_object.cache_clear()  # another test's functions have the same import path
    yield seen
    load_object.cache_clear()


@pytest.mark.parametrize("policy", [isolate_sequences, second_derivatives, batch_invariant, forward_mode])
def test_a_pass_traced_later_has_the_policies_of_its_call(contexts, x, policy, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.dispatch.invariance_refusals", lambda *_: ())
    with policy():
        expected = active_policies()
        jaxpr = jax.make_jaxpr(toy.toy)(x)
    contexts.clear()
    gradient = jax.grad(lambda x: jnp.sum(jax.extend.core.jaxpr_as_fun(jaxpr)(x)[0]))(x)
    np.testing.assert_allclose(gradient, 2 * x)
    assert {"limit", "backward"} <= {name for name, *_ in contexts}
    assert all(policies == expected for _, _, policies in contexts)


def test_a_gradient_exported_for_another_device_is_traced_for_that_device(contexts, x):
    with target_device("v7x"):
        exported = jax.export.export(jax.jit(toy.toy), platforms=["tpu"])(x)
    contexts.clear()
    assert exported.serialize(vjp_order=1)
    assert {name for name, *_ in contexts} >= {"limit", "forward", "backward"}
    assert {device for _, device, _ in contexts} == {DEVICES_BY_SHORT_NAME["v7x"]}
