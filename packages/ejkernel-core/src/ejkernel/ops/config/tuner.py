"""Measures configurations on the device."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax

from ejkernel import _compat
from ejkernel.errors import TunerError
from ejkernel.ops.config.key import device_label
from ejkernel.ops.config.measurement import Measurement, TuningResult
from ejkernel.ops.config.selection import Request
from ejkernel.ops.device import DeviceInfo, device_info

MIN_SAMPLE_SECONDS = 0.02
"""Seconds that a sample takes at least, so that neither the clock nor the start of a call shows in it."""

MIN_SAMPLES = 2
"""Fewer have no spread."""

MAX_CALLS_PER_SAMPLE = 100
"""Calls in a sample at most."""

SLOW_CANDIDATE_RATIO = 1.5
"""A candidate that took this many times as long as the fastest, in both of the first rounds, is timed no further.

A single round may catch a device that has yet to wake up from waiting for the compiler.
"""


@dataclasses.dataclass(kw_only=True)
class _CandidateRun:
    """A candidate while it is measured.

    Attributes:
        part: Its configuration part.
        run: Starts one call.
        waits_for_each_call: Whether a call must end before the next call starts, because CPUs run several calls at
            once.
        traced_kernel: The traced function, which is compiled before the candidate runs.
        calls: Calls a sample.
        sample_seconds: Seconds a call took in each sample.
        error: Why it does not run.
    """

    part: Any
    run: Callable[[], Any]
    waits_for_each_call: bool
    traced_kernel: Any = None
    calls: int = 1
    sample_seconds: list[float] = dataclasses.field(default_factory=list[float])
    error: str | None = None

    def trace_kernel(self, kernel: Callable[[Any, Any], Any], argument: Any) -> None:
        self.traced_kernel = jax.jit(lambda value: kernel(value, self.part)).trace(argument)

    def compile_traced(self, argument: Any) -> None:
        self.run = functools.partial(self.traced_kernel.lower().compile(), argument)

    def warm_up(self, iterations: int) -> None:
        for _ in range(iterations):
            jax.block_until_ready(self.run())

    def take_sample(self) -> None:
        """Takes a sample. The first sample determines how many calls the later samples need; it counts if it was long
        enough.
        """
        seconds = self._mean_seconds_per_call()
        if not self.sample_seconds:
            self.calls = max(1, min(MAX_CALLS_PER_SAMPLE, math.ceil(MIN_SAMPLE_SECONDS / max(seconds, 1e-9))))
            seconds = self._mean_seconds_per_call() if self.calls > 1 else seconds
        self.sample_seconds.append(seconds)

    def _mean_seconds_per_call(self) -> float:
        outputs, start = None, time.perf_counter()
        for _ in range(self.calls):
            outputs = self.run()
            if self.waits_for_each_call:
                jax.block_until_ready(outputs)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - start) / self.calls

    def run_step_unless_failed(self, step: Callable[[], None]) -> None:
        """Takes a step, unless an earlier one failed."""
        if self.error is None:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a candidate may exceed any limit of the device or its compiler
                self.error = f"{type(error).__name__}: {error}"

    def measurement(self) -> Measurement:
        if self.error:
            return Measurement(self.part, None, self.error)
        return Measurement(
            self.part,
            statistics.median(self.sample_seconds),
            None,
            spread(self.sample_seconds),
            len(self.sample_seconds),
        )


def spread(times: Sequence[float]) -> float:
    """Returns interquartile range; 0 for a single sample."""
    if len(times) < MIN_SAMPLES:
        return 0.0
    first_quartile, _, third_quartile = statistics.quantiles(times, n=4, method="inclusive")
    return third_quartile - first_quartile


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Times candidates eagerly: all are compiled and warmed up, then they are timed interleaved, and medians count.

    A sample is as many calls as it takes to be long. Candidates that are clearly slow are left out after two rounds.

    Attributes:
        warmup_iterations: Untimed runs after compilation.
        timing_iterations: Samples of each candidate.
        show_progress: Whether to show progress, of compiling too.
        warmup: Short for `warmup_iterations`.
        iters: Short for `timing_iterations`.

    Raises:
        ValueError: A negative number of warm-ups, or nothing to time.
    """

    warmup: dataclasses.InitVar[int | None] = None
    iters: dataclasses.InitVar[int | None] = None
    warmup_iterations: int = dataclasses.field(default=2, kw_only=True)
    timing_iterations: int = dataclasses.field(default=5, kw_only=True)
    show_progress: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self, warmup: int | None, iters: int | None) -> None:
        for name, value in (("warmup_iterations", warmup), ("timing_iterations", iters)):
            if value is not None:
                object.__setattr__(self, name, value)
        for name, least in (("warmup_iterations", 0), ("timing_iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants {least} or more")

    def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Returns median seconds of `fn(*args, **kwargs)` on the device.

        Raises:
            TunerError: Something is being traced, so that the clock would show Python and not the device.
        """
        if is_under_trace((args, kwargs)):
            raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
        alone = _make_candidate_run(None, functools.partial(fn, **kwargs), *args)
        alone.warm_up(1 + self.warmup_iterations)
        for _ in range(self.timing_iterations):
            alone.take_sample()
        return statistics.median(alone.sample_seconds)

    def autotune(
        self, make_fn: Callable[[Any], Callable[..., Any]], args: Any, kwargs: Any, candidates: Iterable[Any]
    ) -> Any:
        """Returns the candidate whose function `make_fn(candidate)` is fastest.

        Args:
            make_fn: Makes the function of a candidate.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            candidates: What to choose from.

        Raises:
            TunerError: In the same cases as in `measure`, or if no candidate ran.
        """
        seconds: list[tuple[float, Any]] = []
        errors: list[str] = []
        for candidate in candidates:
            try:
                seconds.append((self.measure(make_fn(candidate), *args, **kwargs), candidate))
            except TunerError:
                raise
            except Exception as error:  # noqa: BLE001 - a candidate may exceed any limit of the device or its compiler
                errors.append(f"{candidate}: {type(error).__name__}: {error}")
        if not seconds:
            raise TunerError("\n  ".join(["no candidate ran:", *errors]))
        return min(seconds, key=lambda measured: measured[0])[1]

    def tune(self, request: Request, kernel_argument: Any) -> TuningResult:
        """Measures every candidate of an implementation for one direction of a call, or for both passes of a pair.

        Args:
            request: What is tuned.
            kernel_argument: Concrete record (forward) or `Pullback` (backward, or both).

        Raises:
            TunerError: Something is being traced; the call is for another device than its arrays are on; no candidate
                ran, and then the message gives each one's error.
        """
        _check_measurable(request, kernel_argument)
        implementation = request.implementation
        kernel = request.kernel()
        parts = implementation.config.candidates(request.record, request.device, request.direction)
        unique = dict.fromkeys((request.heuristic(), *parts))
        contenders = [_make_candidate_run(part, kernel, kernel_argument) for part in unique]
        label = f"{request.op.name} {request.direction} {implementation.name}"
        with self._tuning_progress(2 * len(contenders), label) as advance:
            _compile_candidate_runs(contenders, kernel, kernel_argument, advance)
            self._measure_interleaved(contenders, advance)
        measured = [contender.measurement() for contender in contenders]
        ranked = sorted(measured, key=lambda m: float("inf") if m.seconds is None else m.seconds)
        if ranked[0].seconds is None:
            raise TunerError("\n  ".join([f"no candidate of {label} ran:", *(f"{m.part}: {m.error}" for m in ranked)]))
        return TuningResult(request.key(), implementation.name, tuple(ranked), request.kind(), request.heuristic())

    def _measure_interleaved(self, contenders: list[_CandidateRun], advance: Callable[[str], None]) -> None:
        """Measures the contenders interleaved, in rounds, so that a device that slows down does so for all of them."""
        for contender in contenders:
            contender.run_step_unless_failed(functools.partial(contender.warm_up, 1 + self.warmup_iterations))
            advance("measuring")
        running = contenders
        for number in range(self.timing_iterations):
            for contender in running[:: -1 if number % 2 else 1]:
                contender.run_step_unless_failed(contender.take_sample)
            running = [contender for contender in running if contender.error is None]
            if number > 0:
                limit = SLOW_CANDIDATE_RATIO * min(
                    (min(contender.sample_seconds) for contender in running), default=0.0
                )
                running = [contender for contender in running if min(contender.sample_seconds) <= limit]

    @contextlib.contextmanager
    def _tuning_progress(self, steps: int, label: str) -> Generator[Callable[[str], None]]:
        """Yields a function to call with the name of each finished step, which advances the progress bar."""
        if not self.show_progress:
            yield lambda step: None
            return
        import tqdm

        with tqdm.tqdm(total=steps, desc=f"{label}, compiling", unit="step") as bar:

            def advance(step: str) -> None:
                bar.set_description(f"{label}, {step}", refresh=False)
                bar.update()

            yield advance


def _make_candidate_run(part: Any, function: Callable[..., Any], *args: Any) -> _CandidateRun:
    return _CandidateRun(
        part=part, run=functools.partial(function, *args), waits_for_each_call=_device_of(args).platform == "cpu"
    )


def _compile_candidate_runs(
    candidate_runs: list[_CandidateRun],
    kernel: Callable[[Any, Any], Any],
    argument: Any,
    advance_progress: Callable[[str], None],
) -> None:
    """Traces the contenders one by one, as JAX's settings hold for a thread, and compiles them side by side."""
    for contender in candidate_runs:
        contender.run_step_unless_failed(functools.partial(contender.trace_kernel, kernel, argument))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(c.run_step_unless_failed, functools.partial(c.compile_traced, argument)) for c in candidate_runs
        ]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
            advance_progress("compiling")


def is_under_trace(tree: Any) -> bool:
    """Returns whether a trace is going on, or something in `tree` comes from one."""
    return _compat.under_trace() or any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(tree))


def _check_measurable(request: Request, argument: Any) -> None:
    if is_under_trace(argument):
        raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
    actual = _device_of(argument)
    if device_label(actual) != device_label(request.device):
        raise TunerError(f"a call for {request.device} cannot be measured on {actual}")


def _device_of(tree: Any) -> DeviceInfo:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    devices = arrays[0].sharding.device_set if arrays else {_compat.default_device()}
    return device_info(next(iter(devices)))
