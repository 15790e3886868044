"""Measuring configurations on the real device."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.ops.arguments import array_fields
from ejkernel.ops.config.key import device_label
from ejkernel.ops.config.measurement import Measurement, TunerError, TunerWarning, TuningResult
from ejkernel.ops.config.params import Direction
from ejkernel.ops.config.selection import Request
from ejkernel.ops.device import DeviceInfo, device_info
from ejkernel.ops.dispatch import Choice
from ejkernel.ops.execution.lowering import lowered
from ejkernel.ops.grad import Plan
from ejkernel.ops.pullback import Pullback

BOTH: tuple[Direction, ...] = ("forward", "backward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuner:
    """Times candidates eagerly: compile, warm up, then the median of repeats.

    Attributes:
        warmup_iterations: Untimed runs after compilation.
        timing_iterations: Timed runs.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: A negative number of warm-ups, or nothing to time.
    """

    warmup_iterations: int = 2
    timing_iterations: int = 5
    show_progress: bool = False

    def __post_init__(self) -> None:
        for name, least in (("warmup_iterations", 0), ("timing_iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants {least} or more")

    def measure(self, function: Callable[..., Any], *args: Any) -> float:
        """Median seconds of `function(*args)` on the device.

        Raises:
            TunerError: Something is being traced, so that the clock would show Python and not the device.
        """
        if traced(args):
            raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
        for _ in range(1 + self.warmup_iterations):
            jax.block_until_ready(function(*args))
        times: list[float] = []
        for _ in range(self.timing_iterations):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def tune(self, request: Request, argument: Any) -> TuningResult:
        """Measures every candidate of an implementation for one direction of a call.

        Args:
            request: What is tuned.
            argument: Concrete record (forward) or `Pullback` (backward).

        Raises:
            TunerError: Something is being traced; the call is for another device than its arrays are on; no candidate
                ran, and then the message gives each one's error.
        """
        _check_measurable(request, argument)
        implementation = request.implementation
        kernel = implementation.function(request.direction)
        parts = implementation.config.candidates(request.record, request.device, request.direction)
        unique = dict.fromkeys((request.heuristic(), *parts))
        label = f"{request.op.name} {request.direction} {implementation.name}"
        measured = [self._try(kernel, part, argument) for part in self._progress(list(unique), label)]
        ranked = sorted(measured, key=lambda m: float("inf") if m.seconds is None else m.seconds)
        if ranked[0].seconds is None:
            raise TunerError("\n  ".join([f"no candidate of {label} ran:", *(f"{m.part}: {m.error}" for m in ranked)]))
        return TuningResult(request.key(), implementation.name, tuple(ranked))

    def _try(self, kernel: Callable[[Any, Any], Any], part: Any, argument: Any) -> Measurement:
        function = jax.jit(lambda value: kernel(value, part))
        try:
            return Measurement(part, self.measure(function, argument))
        except Exception as error:  # noqa: BLE001 - a candidate may exceed any limit of the device or its compiler
            return Measurement(part, None, f"{type(error).__name__}: {error}")

    def _progress(self, parts: list[Any], label: str) -> Any:
        if not self.show_progress:
            return parts
        import tqdm

        return tqdm.tqdm(parts, desc=label, unit="config")


def traced(tree: Any) -> bool:
    """Whether a trace is going on, or something in `tree` comes from one."""
    return _compat.under_trace() or any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(tree))


def tune_missing(plan: Plan, args: Any) -> None:
    """Before an eager call: measures its forward pass, unless a tier before autotune knows it.

    In a job of several processes only process 0 measures; the others take its decision. Arrays that are spread over
    processes cannot be measured by one of them; such a call is left to offline tuning.
    """
    leaves, structure = jax.tree.flatten(args)
    call = (plan, structure, tuple(map(jax.api_util.shaped_abstractify, leaves)))
    settled = plan.chain.cache.settled
    if call in settled:
        return
    record, choice = _lowered(plan, args)
    if choice.implementation is None:
        return
    here = all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)
    selection = plan.chain.choose(plan.request(choice, record), record if here else None)
    if selection.tier != "overlay":  # which says nothing about the call outside its block
        settled.add(call)


def tune_call(
    plan: Plan, args: Any, directions: tuple[Direction, ...] = BOTH, *, mesh: Any = None, in_specs: Any = None
) -> list[TuningResult]:
    """Measures the given passes of a concrete call and stores the winners.

    Args:
        plan: How the call is carried out; its chain keeps the results.
        args: Concrete argument record.
        directions: Which passes.
        mesh: With in_specs: what is tuned is one shard of the call.
        in_specs: Partition specs of the first arguments, in public order.

    Returns:
        A result for each pass that an implementation serves. In a job of several processes only process 0 measures
        and has results; the winners are in force everywhere.

    Raises:
        TunerError: As `Tuner.tune`, or the policy forbids it.
    """
    if traced(args):
        raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
    record, forward = _lowered(plan, args, mesh, in_specs)
    if forward.implementation is None:
        return []
    results: list[TuningResult | None] = []
    if "forward" in directions:
        results.append(plan.chain.tune(plan.request(forward, record), lambda: record))
    wanted = frozenset(plan.op.family.differentiable) & set(array_fields(record))
    backward = plan.pick(record, "backward", wanted)
    if "backward" in directions and wanted and backward.implementation is not None:
        make = functools.partial(_pullback, plan, record, forward, wanted)
        results.append(plan.chain.tune(plan.request(backward, record), make))
    return [result for result in results if result is not None]


def _pullback(plan: Plan, record: Any, forward: Choice, wanted: frozenset[str]) -> Pullback:
    """What the backward implementation is given, with a random cotangent."""
    assert forward.implementation is not None  # the caller has looked
    kernel = forward.implementation.function("forward")
    config = plan.chain.choose(plan.request(forward, record)).part
    output, residuals = jax.jit(lambda r: kernel(r, config))(record)
    draw = functools.partial(jax.random.normal, jax.random.key(1), dtype=jnp.float32)
    cotangent = jax.tree.map(lambda x: draw(shape=x.shape).astype(x.dtype), output)
    return Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, wanted=wanted)


def _lowered(plan: Plan, args: Any, mesh: Any = None, in_specs: Any = None) -> tuple[Any, Choice]:
    record = jax.jit(lambda args: lowered(plan.op, args, mesh, in_specs))(args)
    return record, plan.pick(record, "forward")


def _check_measurable(request: Request, argument: Any) -> None:
    if traced(argument):
        raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
    actual = _device_of(argument)
    if device_label(actual) != device_label(request.device):
        raise TunerError(f"a call for {request.device} cannot be measured on {actual}")


def _device_of(tree: Any) -> DeviceInfo:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    devices = arrays[0].sharding.device_set if arrays else {_compat.default_device()}
    return device_info(next(iter(devices)))


__all__ = [
    "Measurement",
    "Tuner",
    "TunerError",
    "TunerWarning",
    "TuningResult",
    "traced",
    "tune_call",
    "tune_missing",
]
