"""Passes of one operation inside of another's kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import private_residuals
import pytest
import toy

from ejkernel.ops import NoImplementationError, Pullback
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
