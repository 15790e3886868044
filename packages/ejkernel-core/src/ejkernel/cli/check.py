"""Compares the result of a benchmark with the operation's reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.cli.measuring import temporary_bytes
from ejkernel.ops.model import Op

# References are plain jnp and may hold all scores at once; a larger one would take longer than the benchmark.
REFERENCE_LIMIT_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Holds the outcome of a comparison: whether it passed (None without one), and a few words about it."""

    passed: bool | None
    text: str


def compare_with_reference(op: Op, args: Any, record: Any, passes: str, result: Any) -> Comparison:
    """Compares an output, or an output and its gradients, with the operation's reference.

    Args:
        op: The operation.
        args: The call's argument record.
        record: The same, lowered.
        passes: `"forward"`, or with backward.
        result: What ran: the family's output, or (output, gradients of its sum by record field).
    """
    dtype = jnp.dtype(op.family.dtype(record)).name
    if dtype not in op.tolerance:
        return Comparison(None, f"skipped: no tolerance for {dtype}")
    rtol, atol = op.tolerance[dtype].rtol, op.tolerance[dtype].atol
    if passes == "forward":
        want = _run_reference(op.reference, args)
        got = op.finish(args, result)
    else:
        names = tuple(sorted(result[1]))
        want = _run_reference(functools.partial(_reference_gradients, op, names), record)
        got = [result[1][name] for name in names]
    if isinstance(want, Comparison):
        return want
    pairs = [
        (_to_accumulator_dtype(g), _to_accumulator_dtype(w))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    # A gradient is a sum of many products, so its small entries carry the rounding of the large ones.
    largest = max((float(jnp.max(jnp.abs(w), initial=0.0)) for _, w in pairs), default=0.0)
    scale = 1.0 if passes == "forward" else max(1.0, largest)
    error = max((float(jnp.max(jnp.abs(g - w), initial=0.0)) for g, w in pairs), default=0.0)
    passed = all(
        bool(jnp.all(jnp.abs(g - w) <= atol * scale + rtol * jnp.maximum(jnp.abs(w), scale))) for g, w in pairs
    )
    return Comparison(passed, f"{'agrees' if passed else 'DIFFERS'}, largest error {error:.1e}")


def check_reference_fits(needed_bytes: int | None) -> Comparison:
    """Says whether the reference fits in memory; if so, its own comparison passes."""
    if needed_bytes is not None and needed_bytes <= REFERENCE_LIMIT_BYTES:
        return Comparison(True, "is the reference")
    size = "an unknown amount" if needed_bytes is None else f"{needed_bytes / 2**30:.1f} GiB"
    return Comparison(None, f"skipped: the reference needs {size} of memory")


def _run_reference(function: Callable[[Any], Any], argument: Any) -> Any:
    """Runs the reference; returns a skipped check if it is too large."""
    try:
        compiled = jax.jit(function).lower(argument).compile()
        allowed = check_reference_fits(temporary_bytes(compiled))
        return allowed if allowed.passed is None else compiled(argument)
    except jax.errors.JaxRuntimeError as error:
        return Comparison(None, f"skipped: the reference does not run here: {str(error).splitlines()[0]}")


def _reference_gradients(op: Op, names: tuple[str, ...], record: Any) -> list[Any]:
    def sum_of_output(field_values: dict[str, Any]) -> Any:
        output = op.family.reference(dataclasses.replace(record, **field_values))[0]
        return sum(jnp.sum(leaf.astype(_accumulator_dtype(leaf))) for leaf in jax.tree.leaves(output))

    gradients = jax.grad(sum_of_output)({name: getattr(record, name) for name in names})
    return [gradients[name] for name in names]


def _accumulator_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _to_accumulator_dtype(x: Any) -> Any:
    return x.astype(_accumulator_dtype(x))
