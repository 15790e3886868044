"""Gradients of one call with respect to some of its arguments, then to others: under `jax.checkpoint` or `jax.jit`, JAX
traces a function once, and the rules of its `custom_vjp` calls for every set of differentiated arguments.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import gated_linear_attention
from ejkernel.types import residual_trees


def recurrence(mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    spec = jax.sharding.PartitionSpec(None, "sp")
    options: dict[str, Any] = {"mesh": mesh, "in_specs": (spec,) * 4, "out_specs": spec} if mesh else {}
    return lambda *arrays: gated_linear_attention(*arrays, **options)


def assert_gradients_do_not_depend_on_earlier_ones(function: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> None:
    loss = jax.jit(lambda *arrays: jnp.sum(jnp.sin(function(*arrays))))
    everything = tuple(range(len(arrays)))
    want = jax.grad(loss, everything)(*arrays)
    for some in ((1,), (2, 3)):
        for number, gradient in zip(some, jax.grad(loss, some)(*arrays), strict=True):
            np.testing.assert_allclose(gradient, want[number], rtol=1e-5, atol=1e-6)
    again = jax.grad(jax.checkpoint(loss), everything)(*arrays)
    for got, gradient in zip(again, want, strict=True):
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-6)


def arrays_of_call() -> tuple[jax.Array, ...]:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    return query, key, value, -jnp.ones((1, 8, 2)) / 8


def test_gradients_do_not_depend_on_what_was_differentiated_before():
    assert_gradients_do_not_depend_on_earlier_ones(recurrence(None), arrays_of_call())


@pytest.mark.needs("4 devices")
def test_gradients_of_split_tokens_do_not_depend_on_what_was_differentiated_before():
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert_gradients_do_not_depend_on_earlier_ones(recurrence(mesh), arrays_of_call())


def test_two_threads_that_trace_one_call_keep_their_trees(monkeypatch):
    trees, both_count, zeros = residual_trees.ResidualTrees(), threading.Barrier(2, timeout=10), jnp.zeros

    def zeros_after_both_count(shape, dtype):
        if len(shape) == 2:
            both_count.wait()
        return zeros(shape, dtype)

    monkeypatch.setattr(jnp, "zeros", zeros_after_both_count)
    residuals = [{"query": np.ones(2)}, {"key": np.ones(3)}]
    with ThreadPoolExecutor(2) as pool:
        packed = list(pool.map(trees.pack, residuals))
    assert [list(trees.unpack(x)) for x in packed] == [["query"], ["key"]]
