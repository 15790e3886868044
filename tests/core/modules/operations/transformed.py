"""What JAX's transformations must not change about a call, for any operation.

A call is a function of arrays alone; `argnums` says which of them are differentiated. Its results are weighted by fixed
normal numbers and summed, so that every one of them counts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

# For `jax.jit` where compiling takes most of the time. Eager calls, and the conformance suite, compile as users do.
QUICK = {"xla_backend_optimization_level": "0"}
EPSILON = 1e-5

Call = Callable[..., Any]


def graded(call: Call, argnums: Sequence[int]) -> Callable[..., tuple[Any, tuple[jax.Array, ...]]]:
    """(*arrays) -> (results, gradients of their weighted sum), not compiled."""

    def loss(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        results = call(*arrays)
        return sum(jnp.sum(w * x) for w, x in zip(_weights(results), jax.tree.leaves(results), strict=True)), results

    def both(*arrays: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        (_, results), gradients = jax.value_and_grad(loss, tuple(argnums), has_aux=True)(*arrays)
        return results, gradients

    return both


def quickly(function: Call) -> Call:
    """`jax.jit` with little effort spent on compiling."""
    return jax.jit(function, compiler_options=QUICK)


def close(got: Any, want: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Raises AssertionError unless two pytrees agree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol), got, want)


def close_sums(got: Any, want: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """`close`, with `atol` of an array's largest entry, if that is above 1: programs that add in other orders.

    Sums round as their terms do, however much of them cancels, and each processor adds in an order of its own.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)

    def check(g: Any, w: Any) -> None:
        w = np.asarray(w)
        numbers = np.abs(w[np.isfinite(w)]) if w.dtype.kind == "f" else np.zeros(0)
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol * np.max(numbers, initial=1.0))

    jax.tree.map(check, got, want)


def check_finite_differences(call: Call, arrays: Sequence[jax.Array], argnums: Sequence[int]) -> None:
    """In float64: every gradient is the slope along a random direction."""
    run, rng = quickly(graded(call, argnums)), np.random.default_rng(2)
    results, gradients = run(*arrays)
    weights = _weights(results)
    for n, gradient in zip(argnums, gradients, strict=True):
        direction = rng.normal(size=arrays[n].shape)
        moved = [[*arrays[:n], arrays[n] + step * direction, *arrays[n + 1 :]] for step in (EPSILON, -EPSILON)]
        high, low = (
            sum(float(np.vdot(w, x)) for w, x in zip(weights, jax.tree.leaves(run(*m)[0]), strict=True)) for m in moved
        )
        slope = float(jnp.vdot(gradient, direction))
        assert slope == pytest.approx((high - low) / (2 * EPSILON), rel=1e-6, abs=1e-7), n


def checked(call: Callable[[dict[str, jax.Array]], Any], arrays: Mapping[str, Any]) -> Any:
    """Returns what a call of arrays by name returns; its gradients have been compared with finite differences."""

    def by_position(*values: jax.Array) -> Any:
        return call(dict(zip(arrays, values, strict=True)))

    values = [jnp.asarray(x) for x in arrays.values()]
    check_finite_differences(by_position, values, range(len(values)))
    return quickly(by_position)(*values)


def check_transforms(
    call: Call, arrays: Sequence[jax.Array], argnums: Sequence[int], others: Sequence[jax.Array]
) -> None:
    """Eager, jitted, checkpointed, exported and mapped calls have the same results and gradients.

    Args:
        call: The call.
        arrays: Its arrays.
        argnums: Which are differentiated.
        others: Other values of the same shapes, for the second call of two that are mapped over.
    """
    both = graded(call, argnums)
    run = quickly(both)
    want = run(*arrays)
    close_sums(both(*arrays), want)
    close_sums(quickly(graded(jax.checkpoint(call), argnums))(*arrays), want)
    close_sums(export.export(jax.jit(both), platforms=["cpu"])(*arrays).call(*arrays), want)
    stacked = [jnp.stack(pair) for pair in zip(arrays, others, strict=True)]
    got, wants = quickly(jax.vmap(both))(*stacked), (want, run(*others))
    for n, each in enumerate(wants):
        close_sums(jax.tree.map(lambda x, n=n: x[n], got), each)


def check_no_new_compilations(call: Call, arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> None:
    """An eager call with other values compiles nothing, and a traced one is traced once; yet the values matter."""
    first = call(*arrays)
    with compilations() as compiled:
        second = call(*others)
    assert not compiled
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert any(not np.allclose(one, other) for one, other in pairs)
    step = jax.jit(lambda *arrays: call(*arrays))
    step(*arrays)
    step(*others)
    assert step._cache_size() == 1


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the modules that XLA compiles inside the block."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def temporary_bytes(call: Call, arrays: Sequence[Any], argnums: Sequence[int]) -> int:
    """Temporary memory of a call with its gradients; the arrays may be `jax.ShapeDtypeStruct`s."""
    program = jax.jit(graded(call, argnums)).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes


def _weights(results: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=x.shape).astype(x.dtype) for x in jax.tree.leaves(results)]
