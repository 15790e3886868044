"""`ejkernel bench`."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from rich.console import Console

from ejkernel._version import __version__
from ejkernel.cli.as_json import AS_JSON, print_json
from ejkernel.cli.baselines import baselines, with_gradients
from ejkernel.cli.calls import Call, CallSpec, one_line_errors, takes_call
from ejkernel.cli.check import Check, check, within_limit
from ejkernel.cli.counts import Count, count
from ejkernel.cli.measuring import samples, temporary_bytes
from ejkernel.cli.tables import console, megabytes, milliseconds, print_choice, print_plain, print_table
from ejkernel.ops.arguments import array_fields
from ejkernel.ops.call import default_chain, make_plan
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.dispatch import Choice, Verdict
from ejkernel.ops.execution.tuner import spread
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.pullback import Pullback, Results

PASSES = ("forward", "forward + backward")
REFERENCE = "reference"
BASELINE = "baseline"
SWEEP_HELP = "Time several sizes of an axis, by its letter in `ejkernel ops`: t,s=1024,2048,4096 sets both."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of the table, and one bar or point of the plot.

    Attributes:
        call: What was called.
        at: The size that is swept over; None where there is one size.
        implementation: Whose kernel; a backward pass of somebody else's is named after a plus sign.
        passes: One of `PASSES`.
        config: The configuration it ran with.
        seconds: Median time; None where it did not run.
        spread: Interquartile range of the times.
        temporary: Bytes it needs besides inputs and outputs; None where the device does not say.
        count: Its operations and bytes.
        check: How it compared with the reference, or why it did not run.
    """

    call: str
    at: int | None = None
    implementation: str
    passes: str
    config: str
    seconds: float | None
    spread: float = 0.0
    temporary: int | None
    count: Count
    check: Check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """One pass of one implementation: what a `Timing` says about it, and the function of the lowered record."""

    implementation: str
    passes: str
    config: str
    function: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the options say about timing.

    Attributes:
        repeat: Timed runs of each.
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


def parse_sweep(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Reads `t,s=1024,2048`."""
    letters, _, sizes = text.partition("=")
    numbers = [size.strip() for size in sizes.split(",")]
    if not letters.strip() or not all(number.isdecimal() and int(number) for number in numbers):
        raise click.BadParameter(f"got {text!r}, wants axis letters and sizes, such as t,s=1024,2048")
    return tuple(letter.strip() for letter in letters.split(",")), tuple(map(int, numbers))


@click.command()
@takes_call
@click.option("--repeat", type=click.IntRange(min=1), default=10, show_default=True, help="Timed runs of each.")
@click.option("--sweep", type=parse_sweep, metavar="AXES=SIZES", help=SWEEP_HELP)
@click.option("--baselines/--no-baselines", default=True, help="Also time the reference, jax.nn and lax.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the times into this PNG file.")
@AS_JSON
@click.pass_context
def bench(ctx: click.Context, spec: CallSpec, **given: Any) -> None:
    """Time every implementation that serves a call.

    On random data: forward, and forward with backward. What is small enough is first compared with the operation's
    reference; exits with 1 if that fails. Everything is timed interleaved, so that a noisy machine disturbs all of it;
    the times are medians, the spread is their interquartile range. Without --shape and --case, the operation's
    benchmark cases are run.

    \b
    ejkernel bench flash_attention --shape 1,2048,8,64 -o causal=true --plot times.png
    ejkernel bench flash_attention --shape 1,2048,8,64 --sweep t,s=512,1024,2048 --plot sweep.png
    """
    settings = Settings(**given)
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'ejkernel-core[plot]'")
    out, timings = console(stderr=settings.as_json), list[Timing]()
    for call, at in _calls(spec, settings):
        found = [dataclasses.replace(timing, at=at) for timing in _time(call, settings, out)]
        if not settings.as_json:
            _print(out, call, found)
        timings += found
    _report(spec, settings, timings)
    # What a baseline gets wrong says nothing about a kernel.
    if not timings or any(t.check.passed is False and t.config != BASELINE for t in timings):
        ctx.exit(1)


def _calls(spec: CallSpec, settings: Settings) -> Iterator[tuple[Call, int | None]]:
    """The calls, each with the size that is swept over."""
    if settings.sweep is None:
        yield from ((call, None) for call in spec.calls(default="bench"))
        return
    if not spec.shapes:
        raise click.UsageError("--sweep needs the call's shapes: --shape")
    letters, sizes = settings.sweep
    for size in sizes:
        yield spec.resized(letters, size), size


def _report(spec: CallSpec, settings: Settings, timings: list[Timing]) -> None:
    title = f"{spec.op.name} on {jax.devices()[0].device_kind}; {versions()}"
    if settings.as_json:
        print_json({"operation": spec.op.name, **about(), "timings": [_plain(timing) for timing in timings]})
    if settings.plot is None or not any(timing.seconds for timing in timings):
        return
    from ejkernel.cli.plot import draw, draw_sweep

    if settings.sweep is None:
        draw(timings, settings.plot, title)
    else:
        draw_sweep(timings, settings.plot, title, ", ".join(settings.sweep[0]))
    if not settings.as_json:
        click.echo(f"drawn in {settings.plot}")


def about() -> dict[str, str]:
    """The device and the versions that times belong to."""
    found = {"device": jax.devices()[0].device_kind, "ejkernel": __version__}
    return {**found, **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}}


def versions() -> str:
    """The versions that times belong to, as a phrase."""
    return ", ".join(f"{name} {version}" for name, version in about().items() if name != "device")


def _time(call: Call, settings: Settings, out: Console) -> list[Timing]:
    args = call.make(jax.random.key(0))
    with one_line_errors():
        plan = make_plan(call.op, args, call.platform, None, default_chain())
        call.op.validate(args)
    record = jax.jit(call.op.lower)(args)
    choice = plan.pick(record, "forward")
    if choice.implementation is None:
        print_choice(out, choice)
        return []
    timings, compiled = list[Timing](), list[Callable[[], Any]]()
    runners = [*_runners(plan, record, choice)]
    if settings.baselines:
        runners += _baseline_runners(plan, record, {runner.passes for runner in runners})
    for runner in runners:
        timing, run = _prepared(call, args, record, runner)
        timings.append(timing)
        if run is not None:
            compiled.append(run)
    times = iter(samples(compiled, settings.repeat, warm=True))
    return [timing if timing.seconds is None else _timed(timing, next(times)) for timing in timings]


def _timed(timing: Timing, times: list[float]) -> Timing:
    return dataclasses.replace(timing, seconds=statistics.median(times), spread=spread(times))


def _prepared(call: Call, args: Any, record: Any, runner: Runner) -> tuple[Timing, Callable[[], Any] | None]:
    """Compiles, runs and checks; the timing, still at zero, and what to time, unless it does not run."""
    output = jax.eval_shape(lambda record: call.op.family.reference(record)[0], record)
    about = {name: getattr(runner, name) for name in ("implementation", "passes", "config")}
    timing = Timing(
        call=call.label,
        **about,
        seconds=None,
        temporary=None,
        count=count(call.op.family, record, runner.passes, output),
        check=Check(None, ""),
    )
    try:
        compiled = jax.jit(runner.function).lower(record).compile()
        temporary = temporary_bytes(compiled)
        if runner.implementation == REFERENCE:
            result = within_limit(temporary)
            if result.passed is None:
                return dataclasses.replace(timing, check=result), None
            jax.block_until_ready(compiled(record))
        else:
            result = check(call.op, args, record, runner.passes, jax.block_until_ready(compiled(record)))
    except jax.errors.JaxRuntimeError as error:  # more memory than there is, for example
        failure = Check(False, f"does not run: {str(error).splitlines()[0]}")
        return dataclasses.replace(timing, check=failure), None
    timing = dataclasses.replace(timing, seconds=0.0, temporary=temporary, check=result)
    return timing, functools.partial(compiled, record)


def _baseline_runners(plan: CallPlan, record: Any, passes: set[str]) -> Iterator[Runner]:
    """The reference and JAX's own functions, in the passes that the kernels have."""
    wanted = frozenset(plan.op.family.differentiable) & set(array_fields(record))
    for name, function in baselines(plan.op, record):
        yield Runner(implementation=name, passes=PASSES[0], config=BASELINE, function=function)
        if PASSES[1] in passes:
            both = with_gradients(function, wanted)
            yield Runner(implementation=name, passes=PASSES[1], config=BASELINE, function=both)


def _runners(plan: CallPlan, record: Any, choice: Choice) -> Iterable[Runner]:
    """Both passes of every implementation that can serve the call."""
    wanted = frozenset(plan.op.family.differentiable) & set(array_fields(record))
    backward = plan.pick(record, "backward", wanted)
    unpaired = [v for v in backward.verdicts if v.status != "refused" and not v.implementation.paired]
    for verdict in choice.verdicts:
        if verdict.status == "refused":
            continue
        forward = _pinned(choice, verdict)
        part, run = _kernel(plan, record, forward)
        name, config = verdict.implementation.name, given_values(part)
        output_only = functools.partial(_forward, run)
        yield Runner(implementation=name, passes=PASSES[0], config=config, function=output_only)
        same = next(v for v in backward.verdicts if v.implementation == verdict.implementation)
        followers = [same] if same.status != "refused" else [] if verdict.implementation.paired else unpaired
        if not wanted or not followers:
            continue
        served, follower = _pinned(backward, followers[0]), followers[0].implementation
        back_part, pull = _kernel(plan, record, served)
        same_kernel = follower is verdict.implementation
        both = functools.partial(_forward_and_backward, run, pull, wanted, same_kernel)
        names = " + ".join(dict.fromkeys((name, follower.name)))
        config = config if follower.paired else f"{config}; {given_values(back_part)}"
        yield Runner(implementation=names, passes=PASSES[1], config=config, function=both)


def _forward(run: Any, record: Any) -> Any:
    """The output alone, so that what only the backward pass needs is not computed."""
    return run(record)[0]


def _forward_and_backward(
    run: Any, pull: Any, wanted: frozenset[str], same: bool, record: Any
) -> tuple[Any, dict[str, Any]]:
    """The output, and the gradients of its sum; `same` where one implementation runs both passes."""
    made = Results(*run(record))
    made, output = made if same else made._replace(pocket=None), made.output
    cotangent = jax.tree.map(jnp.ones_like, output)
    saved = Pullback(record=record, cotangent=cotangent, wanted=wanted, **made._asdict())
    return output, {name: gradient for name, gradient in pull(saved).items() if name in wanted}


def _pinned(choice: Choice, verdict: Verdict) -> Choice:
    return dataclasses.replace(choice, verdicts=(dataclasses.replace(verdict, status="chosen"),))


def _kernel(plan: CallPlan, record: Any, choice: Choice) -> tuple[Any, Callable[[Any], Any]]:
    """The configuration that the chain gives an implementation, and its function with that configuration."""
    assert choice.implementation is not None  # callers have looked
    direction: Direction = choice.direction
    part = plan.chain.choose(plan.request(choice, record)).part
    kernel = choice.implementation.function(direction)
    return part, lambda argument: kernel(argument, part)


def _print(out: Console, call: Call, timings: list[Timing]) -> None:
    fastest = {p: min((t.seconds for t in timings if t.passes == p and t.seconds), default=0.0) for p in PASSES}
    ordered = sorted(timings, key=lambda t: (t.passes, t.seconds or float("inf")))
    if not ordered:
        return
    print_plain(out, f"{call.op.name}: {call.label}, on {jax.devices()[0].device_kind}; {versions()}", "bold")
    numbers = ("ms", "spread", "of best", "TFLOP/s", "GB/s", "temporary MB")
    sentences = ("configuration", "against the reference")
    rows = [_row(timing, fastest[timing.passes]) for timing in ordered]
    print_table(out, "", "pass", "implementation", *numbers, *sentences, rows=rows, right=numbers, fold=sentences)
    for text in dict.fromkeys(f"{timing.passes}: {timing.count.text}" for timing in ordered):
        print_plain(out, text, "dim")
    out.print()


def _row(timing: Timing, fastest: float) -> tuple[Any, ...]:
    verdict = (timing.check.text, {True: "green", False: "bold red", None: "dim"}[timing.check.passed])
    if not timing.seconds:
        return (timing.passes, timing.implementation, *"------", timing.config, verdict)
    return (
        timing.passes,
        timing.implementation,
        milliseconds(timing.seconds),
        milliseconds(timing.spread),
        f"{timing.seconds / fastest:.2f}",
        *("-" if rate is None else f"{rate:.3g}" for rate in timing.count.rates(timing.seconds)),
        megabytes(timing.temporary),
        timing.config,
        verdict,
    )


def _plain(timing: Timing) -> dict[str, Any]:
    """A timing as plain data."""
    flops, size = timing.count.rates(timing.seconds) if timing.seconds else (None, None)
    return {**dataclasses.asdict(timing), "tflop_per_s": flops, "gb_per_s": size}
