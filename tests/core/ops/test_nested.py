"""Passes of one operation inside of another's kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import private_residuals
import pytest
import toy

from ejkernel.ops import (
    NoImplementationError,
    Pullback,
    batch_invariant,
    forward_mode,
    isolate_sequences,
    nested,
    registry,
    second_derivatives,
)
from ejkernel.ops.call import default_chain, make_plan
from ejkernel.ops.nested import dispatched_backward, dispatched_forward


def passes(x):
    """Output and gradient of a record of the toy operation."""
    record = toy.OP.lower(toy.OP.arguments(x=x, power=3))
    output, residuals = dispatched_forward("toy", record)
    pullback = Pullback(
        record=record, residuals=residuals, output=output, cotangent=jnp.ones_like(output), grad_fields=frozenset({"x"})
    )
    return output, dispatched_backward("toy", pullback)["x"]


def kernels(x):
    text = jax.jit(lambda x: passes(x)).lower(x).as_text(debug_info=True)
    return sorted(set(re.findall(r"ejkernel\.toy\.(forward|backward)\.(\w+)", text)))


def test_nested_calls_use_the_best_implementation_for_both_passes(use, x):
    use(toy.plugin(toy.implementation("first", priority=1), toy.implementation("other")))

    assert kernels(x) == [("backward", "first"), ("forward", "first")]
    output, gradient = passes(x)
    np.testing.assert_allclose(output, x**3, rtol=1e-6)
    np.testing.assert_allclose(gradient, 3 * x**2, rtol=1e-6)


def test_nested_calls_skip_paired_implementations(use, x):
    """They need private residuals, which have no place in another kernel's residuals."""
    use(toy.plugin(private_residuals.implementation(priority=1), toy.implementation("other")))

    assert kernels(x) == [("backward", "other"), ("forward", "other")]


def test_a_nested_call_with_only_paired_implementations_raises_with_refusals(use, x):
    use(toy.plugin(private_residuals.implementation(priority=1)))

    with pytest.raises(NoImplementationError, match="paired, and the passes of this call are chosen apart"):
        passes(x)


@pytest.mark.parametrize("policy", [isolate_sequences, second_derivatives, batch_invariant, forward_mode])
def test_the_plan_of_a_nested_call_carries_every_policy_of_the_block(plain, x, policy, monkeypatch):
    plans = []
    monkeypatch.setattr(nested.CallPlan, "choose_implementation", lambda plan, *_: plans.append(plan))
    args = toy.OP.arguments(x=x)
    with policy(), pytest.raises(AttributeError):  # no implementation was chosen
        dispatched_forward("toy", toy.OP.lower(args))
    with policy():
        assert plans == [make_plan(toy.OP, args, None, None, default_chain())]
    assert plans != [make_plan(toy.OP, args, None, None, default_chain())]


def test_nested_calls_isolate_sequences_in_a_block():
    op, x = registry().op("flash_attention"), jax.random.normal(jax.random.key(0), (1, 8, 1, 16))

    def second_sequence(value):
        args, _ = op.bind((x, x, value), {"cum_seqlens_q": jnp.array([0, 5, 8])})
        output, _ = dispatched_forward("flash_attention", op.lower(args))
        return output[:, 5:]

    dirty = x.at[:, :5].set(jnp.nan)
    with isolate_sequences():
        np.testing.assert_array_equal(second_sequence(x), second_sequence(dirty))
    assert jnp.isnan(second_sequence(dirty)).any()


def test_nested_calls_refuse_implementations_without_invariance_in_a_block(plain, x):
    with batch_invariant(), pytest.raises(NoImplementationError, match="batch_invariant: its rows may depend on batch"):
        dispatched_forward("toy", toy.OP.lower(toy.OP.arguments(x=x)))
