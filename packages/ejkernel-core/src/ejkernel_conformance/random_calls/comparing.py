"""One program against its meaning: in float64 on the CPU, and XLA in float32 on the same device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import decide
from ejkernel.ops.model import Case
from ejkernel_conformance import running
from ejkernel_conformance.checks import public_arguments
from ejkernel_conformance.compare import assert_close, assert_gradients_close, assert_same_bits
from ejkernel_conformance.random_calls import loops
from ejkernel_conformance.random_calls.draws import HARMLESS
from ejkernel_conformance.random_calls.programs import Program
from ejkernel_conformance.subjects import tolerance

QUICK = {"xla_backend_optimization_level": "0"}
"""For programs on the CPU, whose speed says nothing."""
LOOSE = 2.0
"""How much larger than XLA's own error, in the call's dtype, an error beyond the tolerance may be: there the values of
the call are to blame, such as a recurrence that grows."""

Results = tuple[Any, dict[str, Any]]
"""Outputs, and gradients by name."""


class WrongError(Exception):
    """A call is wrong; the message says how."""


@dataclasses.dataclass
class Findings:
    """The findings about a program.

    Attributes:
        implementation: What dispatch chose, forward and backward.
        dtype: The dtype of the call.
        calls: Calls that were compared.
        differentiated: Whether gradients were.
        refused: Why there are no gradients.
        error: The largest error of the chosen implementation, in parts of the largest number.
        xla_error: That of XLA in float32.
        loose: Calls beyond the tolerance where XLA in the same dtype is as far off.
        loops: Calls of which an independent loop agreed with the reference.
    """

    implementation: str
    dtype: str
    calls: int = 0
    differentiated: bool = False
    refused: str = ""
    error: float = 0.0
    xla_error: float = 0.0
    loose: int = 0
    loops: int = 0


def compare(program: Program, values: int) -> dict[str, Any]:
    """Compares a program on several sets of values.

    Raises:
        WrongError: A call is wrong.
    """
    op, args = program.op, program.arguments(0)
    op.validate(args)
    names = _differentiable(program) if program.differentiated else ()
    record = jax.eval_shape(op.lower, args)
    findings = Findings(_chosen(program, args, bool(names)), jnp.dtype(op.family.dtype(record)).name)
    try:
        run = _compiled(program, names)
        run(args)
        findings.differentiated = bool(names)
    except NoImplementationError as error:
        if not names:
            raise
        findings.refused, names = str(error).splitlines()[0], ()
        run = _compiled(program, ())
    plain, truth = _compiled(program, names, platform="xla"), _truth(program, names)
    accepted = tolerance(op, record)
    for number in range(values):
        args, clean = program.arguments(number), program.arguments(number, poisoned=False)
        got, again = run(args), run(args)
        assert_bits(got, again)
        want = truth(clean)
        if number == 0:
            findings.loops += _check_loop(program, clean, want)
        got, single = _unpoisoned(got, want), _unpoisoned(plain(_cast(clean, np.float32)), want)
        findings.error = max(findings.error, _error(got, want))
        findings.xla_error = max(findings.xla_error, _error(single, want))
        findings.calls += 1
        problem = _difference(got, want, accepted)
        if problem:
            if _error(got, want) > LOOSE * _error(_unpoisoned(plain(clean), want), want):
                raise WrongError(f"values {number}: {problem}; {findings}; {program.drawn.options}")
            findings.loose += 1
    return dataclasses.asdict(findings)


def _check_loop(program: Program, clean: Any, want: Results) -> int:
    """Compares the reference with an independent loop; returns whether there is one."""
    problem = loops.differs(program.op.name, _cast(clean, np.float64), jax.tree.leaves(want[0])[0])
    if problem:
        raise WrongError(f"values 0: {problem}; {program.drawn.options}")
    return int(problem is not None)


def assert_bits(got: Results, again: Results) -> None:
    """Raises WrongError unless two results are equal bit by bit."""
    try:
        assert_same_bits(got, again, "twice the same call")
    except AssertionError as error:
        raise WrongError(str(error)) from error


def _chosen(program: Program, args: Any, differentiated: bool) -> str:
    decision = decide(program.op, args)
    choices = [decision.forward]
    if differentiated:
        choices = [decision.differentiated_forward or decision.forward, decision.backward]
    return ", ".join("none" if x.implementation is None else x.implementation.name for x in choices)


def _differentiable(program: Program) -> tuple[str, ...]:
    """Returns the arguments with a gradient, which are those that reach no field of the record without one."""
    args = program.arguments(0, poisoned=False)
    with jax.default_device(jax.devices("cpu")[0]):
        return running.differentiable_inputs(program.op, Case(name=str(program.seed), make=lambda key: args))


def _compiled(program: Program, names: tuple[str, ...], platform: str | None = None) -> Callable[[Any], Results]:
    """Returns a compiled function of the arguments that calls the public function."""
    op = program.op

    def call(args: Any) -> Any:
        positional, keywords = public_arguments(op, args)
        return op.function(*positional, **keywords, platform=platform)

    run = jax.jit(_both(call, names))
    return lambda args: jax.tree.map(np.asarray, run(args))


def _both(call: Callable[[Any], Any], names: tuple[str, ...]) -> Callable[[Any], Results]:
    """Returns a function with the gradients of named arguments, for cotangents that are the same in every dtype."""
    if not names:
        return lambda args: (call(args), {})

    def run(args: Any) -> Results:
        shapes = jax.eval_shape(call, args)
        return running.with_gradients(call, names)(args, running.normal_like(shapes))

    return run


def _truth(program: Program, names: tuple[str, ...]) -> Callable[[Any], Results]:
    """Returns the reference in float64 on the CPU."""
    run = jax.jit(_both(program.op.reference, names), compiler_options=QUICK)

    def truth(args: Any) -> Results:
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, run(_cast(args, np.float64)))

    return truth


def _cast(args: Any, dtype: Any) -> Any:
    """Returns the record with floats of 16 and 32 bits in another dtype; those of 8 bits are codes."""

    def cast(x: Any) -> Any:
        x = np.asarray(x)
        wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
        return x.astype(dtype) if wide else x

    made = jax.tree.map(cast, args)
    cache = getattr(made, "kv_cache", None)
    if cache is None:
        return made
    # Words of 32 bits hold two numbers of 16: [..., rows of words, numbers of a word, lanes].
    return dataclasses.replace(made, kv_cache=cache.reshape(*cache.shape[:-3], -1, 1, cache.shape[-1]))


def _unpoisoned(got: Results, want: Results) -> Results:
    """Returns results in the shapes of the reference's; poison that was returned as it was is what it
    stands for there.
    """

    def restore(got: np.ndarray, want: np.ndarray) -> np.ndarray:
        got = got.reshape(want.shape)
        returned = np.isinf(got.astype(np.float32)) & (want == HARMLESS)
        return np.where(returned, np.asarray(HARMLESS, got.dtype), got)

    return jax.tree.map(restore, got, want)


def _difference(got: Results, want: Results, accepted: Any) -> str:
    """Returns what is wrong about results; empty where they are within the operation's tolerance."""
    outputs, gradients = (jax.tree.map(lambda g, w: w.astype(g.dtype), g, w) for g, w in zip(got, want, strict=True))
    try:
        assert_close(got[0], outputs, accepted, "output")
        assert_gradients_close(got[1], gradients, accepted, "gradients")
    except AssertionError as error:
        return str(error)
    return ""


def _error(got: Results, want: Results) -> float:
    """Returns the largest difference, in parts of the largest number of its array; infinite where one is not finite
    alone.

    An array of nothing but rounding errors, as a gradient that is zero in exact arithmetic, is measured by a thousandth
    of the largest number of all arrays.
    """
    pairs = [
        (g.astype(np.float64), w.astype(np.float64))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    least = max((_largest(w) for _, w in pairs), default=0.0) * 1e-3
    return max((_array_error(g, w, least) for g, w in pairs), default=0.0)


def _array_error(got: np.ndarray, want: np.ndarray, least: float) -> float:
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return float("inf")
    return float(np.max(np.abs(got[finite] - want[finite]), initial=0.0) / max(_largest(want), least, 1e-30))


def _largest(x: np.ndarray) -> float:
    """Returns the largest absolute value among the finite numbers."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))
