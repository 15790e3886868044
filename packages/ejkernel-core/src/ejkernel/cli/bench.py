"""`ejkernel bench`."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from rich.console import Console

from ejkernel.cli.calls import Call, CallSpec, one_line_errors, takes_call
from ejkernel.cli.check import Check, check
from ejkernel.cli.measuring import interleaved, temporary_bytes
from ejkernel.cli.tables import console, megabytes, milliseconds, print_choice, print_table
from ejkernel.ops.arguments import array_fields
from ejkernel.ops.call import default_chain, make_plan
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.dispatch import Choice, Verdict
from ejkernel.ops.grad import Plan
from ejkernel.ops.pullback import Pullback, Results

PASSES = ("forward", "forward + backward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of the table, and one bar of the plot.

    Attributes:
        call: What was called.
        implementation: Whose kernel; a backward pass of somebody else's is named after a plus sign.
        passes: One of `PASSES`.
        config: The configuration it ran with.
        seconds: Median time; None where it did not run.
        temporary: Bytes it needs besides inputs and outputs; None where the device does not say.
        check: How it compared with the reference, or why it did not run.
    """

    call: str
    implementation: str
    passes: str
    config: str
    seconds: float | None
    temporary: int | None
    check: Check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """One pass of one implementation: what a `Timing` says about it, and the function of the lowered record."""

    implementation: str
    passes: str
    config: str
    function: Callable[[Any], Any]


@click.command()
@takes_call
@click.option("--repeat", type=click.IntRange(min=1), default=10, show_default=True, help="Timed runs of each.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the times into this PNG file.")
@click.pass_context
def bench(ctx: click.Context, spec: CallSpec, repeat: int, plot: Path | None) -> None:
    """Time every implementation that serves a call.

    On random data: forward, and forward with backward. What is small enough is first compared with the operation's
    reference; exits with 1 if that fails. Implementations take turns, so that a noisy machine disturbs all of them;
    the times are medians. Without --shape and --case, the operation's benchmark cases are run.

    \b
    ejkernel bench flash_attention --shape 1,2048,8,64 -o causal=true --plot times.png
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'ejkernel-core[plot]'")
    out, timings = console(), list[Timing]()
    for call in spec.calls(default="bench"):
        found = _time(call, repeat, out)
        _print(out, call, found)
        timings += found
    if plot is not None and timings:
        from ejkernel.cli.plot import draw

        draw(timings, plot)
        click.echo(f"drawn in {plot}")
    if not timings or any(timing.check.passed is False for timing in timings):
        ctx.exit(1)


def _time(call: Call, repeat: int, out: Console) -> list[Timing]:
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
    for runner in _runners(plan, record, choice):
        timing, run = _prepared(call, args, record, runner)
        timings.append(timing)
        if run is not None:
            compiled.append(run)
    medians = iter(interleaved(compiled, repeat, warm=True))
    return [t if t.seconds is None else dataclasses.replace(t, seconds=next(medians)) for t in timings]


def _prepared(call: Call, args: Any, record: Any, runner: Runner) -> tuple[Timing, Callable[[], Any] | None]:
    """Compiles, runs and checks; the timing, still at zero, and what to time, unless it does not run."""
    about = {"call": call.label, **{name: getattr(runner, name) for name in ("implementation", "passes", "config")}}
    try:
        compiled = jax.jit(runner.function).lower(record).compile()
        result = check(call.op, args, record, runner.passes, jax.block_until_ready(compiled(record)))
    except jax.errors.JaxRuntimeError as error:  # more memory than there is, for example
        failure = Check(False, f"does not run: {str(error).splitlines()[0]}")
        return Timing(**about, seconds=None, temporary=None, check=failure), None
    timing = Timing(**about, seconds=0.0, temporary=temporary_bytes(compiled), check=result)
    return timing, functools.partial(compiled, record)


def _runners(plan: Plan, record: Any, choice: Choice) -> Iterable[Runner]:
    """Both passes of every implementation that can serve the call."""
    wanted = frozenset(plan.op.family.differentiable) & set(array_fields(record))
    backward = plan.pick(record, "backward", wanted)
    apart = [v for v in backward.verdicts if v.status != "refused" and not v.implementation.paired]
    for verdict in choice.verdicts:
        if verdict.status == "refused":
            continue
        forward = _pinned(choice, verdict)
        part, run = _kernel(plan, record, forward)
        name, config = verdict.implementation.name, given_values(part)
        output_only = functools.partial(_forward, run)
        yield Runner(implementation=name, passes=PASSES[0], config=config, function=output_only)
        own = next(v for v in backward.verdicts if v.implementation == verdict.implementation)
        followers = [own] if own.status != "refused" else [] if verdict.implementation.paired else apart
        if not wanted or not followers:
            continue
        served, follower = _pinned(backward, followers[0]), followers[0].implementation
        back_part, pull = _kernel(plan, record, served)
        own_pocket = follower is verdict.implementation
        both = functools.partial(_forward_and_backward, run, pull, wanted, own_pocket)
        names = " + ".join(dict.fromkeys((name, follower.name)))
        config = config if follower.paired else f"{config}; {given_values(back_part)}"
        yield Runner(implementation=names, passes=PASSES[1], config=config, function=both)


def _forward(run: Any, record: Any) -> Any:
    """The output alone, so that what only the backward pass needs is not computed."""
    return run(record)[0]


def _forward_and_backward(
    run: Any, pull: Any, wanted: frozenset[str], own: bool, record: Any
) -> tuple[Any, dict[str, Any]]:
    """The output, and the gradients of its sum; `own` where one implementation runs both passes."""
    made = Results(*run(record))
    made, output = made if own else made._replace(pocket=None), made.output
    cotangent = jax.tree.map(jnp.ones_like, output)
    saved = Pullback(record=record, cotangent=cotangent, wanted=wanted, **made._asdict())
    return output, {name: gradient for name, gradient in pull(saved).items() if name in wanted}


def _pinned(choice: Choice, verdict: Verdict) -> Choice:
    return dataclasses.replace(choice, verdicts=(dataclasses.replace(verdict, status="chosen"),))


def _kernel(plan: Plan, record: Any, choice: Choice) -> tuple[Any, Callable[[Any], Any]]:
    """The configuration that the chain gives an implementation, and its function with that configuration."""
    assert choice.implementation is not None  # callers have looked
    direction: Direction = choice.direction
    part = plan.chain.choose(plan.request(choice, record)).part
    kernel = choice.implementation.function(direction)
    return part, lambda argument: kernel(argument, part)


def _print(out: Console, call: Call, timings: list[Timing]) -> None:
    fastest = {p: min((t.seconds for t in timings if t.passes == p and t.seconds), default=0.0) for p in PASSES}
    rows = [
        (
            timing.passes,
            timing.implementation,
            milliseconds(timing.seconds) if timing.seconds else "-",
            f"{timing.seconds / fastest[timing.passes]:.2f}" if timing.seconds else "-",
            megabytes(timing.temporary),
            timing.config,
            (timing.check.text, {True: "green", False: "bold red", None: "dim"}[timing.check.passed]),
        )
        for timing in sorted(timings, key=lambda t: (t.passes, t.seconds or float("inf")))
    ]
    if rows:
        title = f"{call.op.name}: {call.label}, on {jax.devices()[0].device_kind}"
        headings = ("pass", "implementation", "ms", "of best", "temporary MB", "configuration", "against the reference")
        print_table(out, title, *headings, rows=rows, right=["ms", "of best", "temporary MB"], fold=headings[5:])
