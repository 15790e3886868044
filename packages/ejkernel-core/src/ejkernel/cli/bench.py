"""Implements `ejkernel bench`."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console

from ejkernel._version import __version__
from ejkernel.cli.as_json import JSON_OPTION, print_json
from ejkernel.cli.calls import Call, CallOptions, add_call_options, one_line_errors
from ejkernel.cli.check import Comparison, check_reference_fits, compare_with_reference
from ejkernel.cli.counts import WorkCount, count_work
from ejkernel.cli.measuring import interleaved_samples, temporary_bytes
from ejkernel.cli.programs import BASELINE, PASSES, REFERENCE, Program, programs
from ejkernel.cli.progress import format_duration, progress_bar
from ejkernel.cli.tables import (
    format_megabytes,
    format_milliseconds,
    open_console,
    print_choice,
    print_table,
    print_unmarked_text,
)
from ejkernel.ops.call import default_chain, make_plan
from ejkernel.ops.config.tuner import spread

BACKWARD_TO_FORWARD_TIME = 2.5  # forward passes that a backward pass costs, for the estimate
SWEEP_HELP = "Time several sizes of an axis, by its letter in `ejkernel ops`: t,s=1024,2048,4096 sets both t and s."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Holds one line of the table, which is one bar or point of the plot.

    Attributes:
        call: The call, as text.
        at: The size that `--sweep` set; None without it.
        implementation: Name of the implementation; see `Program`.
        passes: One of `PASSES`.
        config: The configuration it ran with.
        seconds: Median time; None if it did not run.
        spread: Interquartile range of the times.
        temporary_bytes: Bytes it needs in addition to inputs and outputs; None if the device does not say.
        work_count: Its floating-point operations and bytes.
        check: How it compared with the reference, or why it did not run.
    """

    call: str
    at: int | None = None
    implementation: str
    passes: str
    config: str
    seconds: float | None
    spread: float = 0.0
    temporary_bytes: int | None
    work_count: WorkCount
    check: Comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """Holds the options about timing.

    Attributes:
        repeat: Timed runs of each program.
        baselines: Whether to time the reference and JAX's own functions too.
        sweep: Axis letters, and the sizes to give them; None for the call as it is.
        plot: PNG file to draw into.
        as_json: Whether to print JSON.
    """

    repeat: int
    baselines: bool
    sweep: tuple[tuple[str, ...], tuple[int, ...]] | None
    plot: Path | None
    as_json: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedProgram:
    """Holds a program that was compiled and checked.

    Attributes:
        timing: The line of the table, still without a time.
        run: What to time; None if the program does not run.
        compile_seconds: How long compiling took.
        first_run_seconds: How long the first run took.
    """

    timing: Timing
    run: Callable[[], Any] | None
    compile_seconds: float = 0.0
    first_run_seconds: float = 0.0


def parse_sweep(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Reads `t,s=1024,2048`."""
    letters, _, sizes = text.partition("=")
    numbers = [size.strip() for size in sizes.split(",")]
    if not letters.strip() or not all(number.isdecimal() and int(number) for number in numbers):
        raise click.BadParameter(f"got {text!r}, wants axis letters and sizes, such as t,s=1024,2048")
    return tuple(letter.strip() for letter in letters.split(",")), tuple(map(int, numbers))


@click.command()
@add_call_options
@click.option(
    "--repeat", type=click.IntRange(min=1), default=10, show_default=True, help="Number of timed runs of each program."
)
@click.option("--sweep", type=parse_sweep, metavar="AXES=SIZES", help=SWEEP_HELP)
@click.option(
    "--baselines/--no-baselines",
    default=True,
    help="Also time the reference and, if there is one, the function of jax.nn or jax.lax that computes the same.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the times into this PNG file.")
@JSON_OPTION
@click.pass_context
def bench(ctx: click.Context, call_options: CallOptions, **options: Any) -> None:
    """Time every implementation that supports a call.

    Times the forward pass, and the forward and backward passes together, on random data. First compares each result
    with the operation's reference, if the reference fits in memory. The exit status is 1 if a result differs.

    The programs are timed in turn, so that other load on the machine affects all of them. The time is the median of
    the runs, the spread their interquartile range. Without --shape and --case, runs the operation's benchmark cases,
    which are smaller on a CPU.

    \b
    ejkernel bench flash_attention --shape 1,2048,8,64 -o causal=true --plot times.png
    ejkernel bench flash_attention --shape 1,2048,8,64 --sweep t,s=512,1024,2048 --plot sweep.png
    """
    timing_options = TimingOptions(**options)
    if timing_options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'ejkernel-core[plot]'")
    out, timings = open_console(stderr=timing_options.as_json), list[Timing]()
    for call, at in _calls_of_sweep(call_options, timing_options):
        rows = [dataclasses.replace(timing, at=at) for timing in _time_programs(call, timing_options, out)]
        if not timing_options.as_json:
            _print_timings(out, call, rows)
        timings += rows
    _print_json_and_plot(call_options, timing_options, timings)
    # A baseline that is wrong says nothing about a kernel.
    if not timings or any(t.check.passed is False and t.config != BASELINE for t in timings):
        ctx.exit(1)


def _calls_of_sweep(call_options: CallOptions, timing_options: TimingOptions) -> Iterator[tuple[Call, int | None]]:
    """Yields the calls, each with the size that `--sweep` sets."""
    if timing_options.sweep is None:
        yield from ((call, None) for call in call_options.calls(default_tag=_tag(call_options)))
        return
    if not call_options.shapes:
        raise click.UsageError("--sweep needs the call's shapes: --shape")
    letters, sizes = timing_options.sweep
    for size in sizes:
        yield call_options.call_with_size(letters, size), size


def _tag(call_options: CallOptions) -> str:
    """Returns the tag of the cases to run without --shape and --case, which are smaller on a CPU."""
    small = jax.devices()[0].platform == "cpu" and any("bench_cpu" in case.tags for case in call_options.op.cases)
    return "bench_cpu" if small else "bench"


def _print_json_and_plot(call_options: CallOptions, timing_options: TimingOptions, timings: list[Timing]) -> None:
    title = f"{call_options.op.name} on {jax.devices()[0].device_kind}; {versions_phrase()}"
    if timing_options.as_json:
        print_json(
            {
                "operation": call_options.op.name,
                **device_and_versions(),
                "timings": [_timing_to_dict(timing) for timing in timings],
            }
        )
    if timing_options.plot is None or not any(timing.seconds for timing in timings):
        return
    from ejkernel.cli.plot import draw_bars, draw_sweep

    try:
        if timing_options.sweep is None:
            draw_bars(timings, timing_options.plot, title)
        else:
            draw_sweep(timings, timing_options.plot, title, ", ".join(timing_options.sweep[0]))
    except OSError as error:
        raise click.ClickException(f"--plot: {timing_options.plot} cannot be written: {error}") from error
    if not timing_options.as_json:
        click.echo(f"plot written to {timing_options.plot}")


def device_and_versions() -> dict[str, str]:
    """Returns the device and the versions that times belong to."""
    environment = {"device": jax.devices()[0].device_kind, "ejkernel": __version__}
    return {**environment, **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}}


def versions_phrase() -> str:
    """Returns the versions that times belong to, as a phrase."""
    return ", ".join(f"{name} {version}" for name, version in device_and_versions().items() if name != "device")


def _time_programs(call: Call, timing_options: TimingOptions, out: Console) -> list[Timing]:
    args = call.make_args(jax.random.key(0))
    with one_line_errors():
        plan = make_plan(call.op, args, call.platform, None, default_chain())
        call.op.validate(args)
    record = jax.jit(call.op.lower)(args)
    choice = plan.choose_implementation(record, "forward")
    if choice.implementation is None:
        print_choice(out, choice)
        return []
    all_programs = programs(plan, record, choice, timing_options.baselines)
    _say(
        timing_options,
        f"{call.op.name}, {call.label}: {len(all_programs)} programs, each timed {timing_options.repeat} times",
    )
    prepared = list[PreparedProgram]()
    with progress_bar(len(all_programs) + timing_options.repeat) as step:
        for number, program in enumerate(all_programs):
            prepared.append(_prepare_program(call, args, record, program))
            if number == 0:
                _say(timing_options, _estimate_duration(prepared[0], all_programs, timing_options.repeat))
            step("compile and check")
        runs = [one.run for one in prepared if one.run is not None]
        times = iter(
            interleaved_samples(
                runs, timing_options.repeat, is_already_warm=True, after_round=functools.partial(step, "time")
            )
        )
    return [one.timing if one.run is None else _with_times(one.timing, next(times)) for one in prepared]


def _say(timing_options: TimingOptions, text: str) -> None:
    """Prints a line about what the command is going to do, unless a program reads JSON."""
    if not timing_options.as_json or sys.stderr.isatty():
        print_unmarked_text(open_console(stderr=True), text, "dim")


def _estimate_duration(first_program: PreparedProgram, call_programs: list[Program], repeat: int) -> str:
    """Says how long a call will take, judged by its first program, which is one forward pass."""
    passes = sum(1 + BACKWARD_TO_FORWARD_TIME * program.has_backward for program in call_programs)
    # The check of a program also compiles and runs the reference. The estimate counts the reference as one more run of
    # the program.
    seconds = passes * (2 * first_program.compile_seconds + (repeat + 2) * first_program.first_run_seconds)
    return f"this takes about {format_duration(seconds)}; --repeat, --no-baselines or smaller shapes make it shorter"


def _with_times(timing: Timing, times: list[float]) -> Timing:
    return dataclasses.replace(timing, seconds=statistics.median(times), spread=spread(times))


def _prepare_program(call: Call, args: Any, record: Any, program: Program) -> PreparedProgram:
    """Compiles, runs and checks a program."""
    output = jax.eval_shape(lambda record: call.op.family.reference(record)[0], record)
    timing = Timing(
        call=call.label,
        implementation=program.implementation,
        passes=program.passes,
        config=program.config,
        seconds=None,
        temporary_bytes=None,
        work_count=count_work(call.op.family, record, program.passes, output),
        check=Comparison(None, ""),
    )
    try:
        started = time.perf_counter()
        compiled = jax.jit(program.function).lower(record).compile()
        compile_seconds, temporary = time.perf_counter() - started, temporary_bytes(compiled)
        is_reference = program.implementation == REFERENCE
        verdict = check_reference_fits(temporary)
        if is_reference and verdict.passed is None:
            return PreparedProgram(timing=dataclasses.replace(timing, check=verdict), run=None)
        started = time.perf_counter()
        result = jax.block_until_ready(compiled(record))
        first_run_seconds = time.perf_counter() - started
        verdict = verdict if is_reference else compare_with_reference(call.op, args, record, program.passes, result)
    except jax.errors.JaxRuntimeError as error:  # for example, the device has too little memory
        failure = Comparison(False, f"does not run: {str(error).splitlines()[0]}")
        return PreparedProgram(timing=dataclasses.replace(timing, check=failure), run=None)
    timing = dataclasses.replace(timing, temporary_bytes=temporary, check=verdict)
    run = functools.partial(compiled, record)
    return PreparedProgram(timing=timing, run=run, compile_seconds=compile_seconds, first_run_seconds=first_run_seconds)


def _print_timings(out: Console, call: Call, timings: list[Timing]) -> None:
    fastest = {p: min((t.seconds for t in timings if t.passes == p and t.seconds), default=0.0) for p in PASSES}
    sorted_timings = sorted(timings, key=lambda t: (t.passes, t.seconds or float("inf")))
    if not sorted_timings:
        return
    print_unmarked_text(
        out, f"{call.op.name}: {call.label}, on {jax.devices()[0].device_kind}; {versions_phrase()}", "bold"
    )
    numbers = ("ms", "spread", "relative", "TFLOP/s", "GB/s", "temporary MB")
    sentences = ("configuration", "against the reference")
    rows = [_timing_row(timing, fastest[timing.passes]) for timing in sorted_timings]
    print_table(
        out,
        "",
        "pass",
        "implementation",
        *numbers,
        *sentences,
        rows=rows,
        right_aligned_columns=numbers,
        folded_columns=sentences,
    )
    for text in dict.fromkeys(f"{timing.passes}: {timing.work_count.text}" for timing in sorted_timings):
        print_unmarked_text(out, text, "dim")
    out.print()


def _timing_row(timing: Timing, fastest_seconds: float) -> tuple[Any, ...]:
    verdict = (timing.check.text, {True: "green", False: "bold red", None: "dim"}[timing.check.passed])
    if not timing.seconds:
        return (timing.passes, timing.implementation, *"------", timing.config, verdict)
    return (
        timing.passes,
        timing.implementation,
        format_milliseconds(timing.seconds),
        format_milliseconds(timing.spread),
        f"{timing.seconds / fastest_seconds:.2f}",
        *("-" if rate is None else f"{rate:.3g}" for rate in timing.work_count.rates(timing.seconds)),
        format_megabytes(timing.temporary_bytes),
        timing.config,
        verdict,
    )


def _timing_to_dict(timing: Timing) -> dict[str, Any]:
    """Converts a timing to plain data."""
    flops, size = timing.work_count.rates(timing.seconds) if timing.seconds else (None, None)
    values = dataclasses.asdict(timing)
    values["temporary"], values["count"] = values.pop("temporary_bytes"), values.pop("work_count")
    return {**values, "tflop_per_s": flops, "gb_per_s": size}
