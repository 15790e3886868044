"""Value channels of the CUDA recurrences that are split into heads: what wraps the kernels changes no results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_cuda.split_values import backward_with_split_values, forward_with_split_values

DELTA = ("query", "key", "value", "decay", "beta")


def make(keys, values, *, channels=1, packed=None):
    """A record in float32 with two heads that share queries and keys, and states."""
    shapes = {
        "query": (1, 20, 1, keys),
        "key": (1, 20, 1, keys),
        "value": (1, 20, 2, values),
        "decay": (1, 20, 2, channels),
        "beta": (1, 20, 2),
        "initial_state": (1, 2, keys, values),
        "sequence_state": (3, 2, keys, values),
    }
    fields = (*DELTA, "initial_state" if packed is None else "sequence_state")
    arrays = {name: jax.random.normal(jax.random.key(len(name)), shapes[name]) for name in fields}
    arrays["key"] = arrays["key"] / jnp.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    arrays["decay"] = jax.nn.log_sigmoid(arrays["decay"])
    offsets = None if packed is None else jnp.array(packed)
    return fields, LinearRecurrence(softmax_scale=0.1, cu_seqlens=offsets, **arrays)


def assert_unchanged(record, names, wrap_forward, wrap_backward):
    """Asserts that the wrapped formula is the formula, and returns the key and value channels that it saw."""
    seen = []

    def formula(fields, record):
        return reference(dataclasses.replace(record, **fields))[0]

    @wrap_forward
    def forward(record, config):
        seen.append((record.query.shape[3], record.value.shape[3]))
        return reference(record)[0], (), None

    @wrap_backward
    def backward(pullback, config):
        fields = {name: getattr(pullback.record, name) for name in names}
        return jax.vjp(lambda fields: formula(fields, pullback.record), fields)[1](pullback.cotangent)[0]

    fields = {name: getattr(record, name) for name in names}
    want_output, pull = jax.vjp(lambda fields: formula(fields, record), fields)
    cotangent = jax.tree.map(jnp.sin, want_output)
    start = Pullback(record=record, residuals=(), output=None, cotangent=cotangent, grad_fields=frozenset(names))
    output, gradients = run_both_passes(forward, backward, start, None)
    for got, want in ((output, want_output), (gradients, pull(cotangent)[0])):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)
    return seen


@pytest.mark.parametrize(
    ("values", "options", "part"),
    [
        (192, {"channels": 16, "packed": (0, 9, 9, 20)}, 64),
        (256, {}, 128),
    ],
)
def test_split_values_change_nothing(values, options, part):
    names, record = make(16, values, **options)
    assert assert_unchanged(record, names, forward_with_split_values, backward_with_split_values) == [(16, part)]
