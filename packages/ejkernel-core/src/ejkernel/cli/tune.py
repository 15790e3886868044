"""`ejkernel tune`."""

import contextlib
import dataclasses
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click
import jax
import msgspec
from click.core import ParameterSource
from rich.console import Console

from ejkernel.cli.cache import STORE
from ejkernel.cli.calls import Call, CallSpec, one_line_errors, takes_call
from ejkernel.cli.tables import console, milliseconds, print_choice, print_table
from ejkernel.cli.targets import find_target
from ejkernel.ops.call import decide, make_plan
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import DAMAGED, Entry, Table, decode, encode, table_name
from ejkernel.ops.device import target_device
from ejkernel.ops.execution.target import Target, tune_described
from ejkernel.ops.execution.tuner import Tuner, TunerError, TuningResult, tune_call
from ejkernel.ops.grad import Plan

TARGET_HELP = (
    "Predict for a device that need not be here, instead of measuring on the one that is: v5e, v5p, v6e or v7x, with "
    "ejkernel-pallas[aot]."
)
DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@click.command()
@takes_call
@click.option("--direction", type=click.Choice(list(DIRECTIONS)), default="both", show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Samples of a candidate.")
@click.option("--target", metavar="NAME", help=TARGET_HELP)
@STORE
@click.option(
    "--export",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write a table that a backend can ship, <device kind>/<op>.json in this directory; merges.",
)
@click.pass_context
def tune(
    ctx: click.Context,
    spec: CallSpec,
    direction: str,
    repeat: int,
    target: str | None,
    store: Path | None,
    export: Path | None,
) -> None:
    """Measure a call's configurations and store the best.

    What is tuned is the implementation that the call would use; --platform picks another.

    \b
    ejkernel tune flash_attention --shape 1,2048,8,64 -o causal=true
    """
    if target is not None and ctx.get_parameter_source("repeat") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--repeat: a prediction for a --target is made once")
    call, out = spec.one(), console()
    kept = PersistentCache(store)
    with one_line_errors():
        if target is None:
            results, plan = _measured(call, direction, repeat, kept, out)
        else:
            results, plan = _predicted(call, direction, find_target(target), kept, out)
    for result in results:
        _print_result(out, plan, call, result, "predicted for" if target else "on")
    entries = _stored(kept, results)
    click.echo(f"stored in {kept.path}")
    if export is not None:
        for path in _export(export, call, results, entries):
            click.echo(f"exported to {path}")


Tuned = tuple[list[TuningResult], Plan]


def _measured(call: Call, direction: str, repeat: int, kept: PersistentCache, out: Console) -> Tuned:
    """On the device that is here."""
    chain = ConfigSelectorChain(tuner=Tuner(timing_iterations=repeat, show_progress=True), persistent=kept)
    plan = make_plan(call.op, call.abstract, call.platform, None, chain)
    with _one_line_tuner_errors():
        results = tune_call(plan, call.make(jax.random.key(0)), DIRECTIONS[direction])
    _check_served(plan, call, direction, results, out)
    return results, plan


def _predicted(call: Call, direction: str, target: Target, kept: PersistentCache, out: Console) -> Tuned:
    """For a device that may be anywhere."""
    with _one_line_tuner_errors():
        chain = ConfigSelectorChain(tuner=target.tuner(True), persistent=kept)
        with target_device(target.device):
            plan = make_plan(call.op, call.abstract, call.platform, None, chain)
        results = tune_described(plan, call.make, DIRECTIONS[direction])
    with target_device(target.device):
        _check_served(plan, call, direction, results, out)
    return results, plan


@contextlib.contextmanager
def _one_line_tuner_errors() -> Generator[None]:
    try:
        yield
    except TunerError as error:
        raise click.ClickException(str(error)) from error


def _check_served(plan: Plan, call: Call, direction: str, results: list[TuningResult], out: Console) -> None:
    """Exits where nobody serves a pass that was to be tuned."""
    found = {result.key.direction for result in results}
    missing = [wanted for wanted in DIRECTIONS[direction] if wanted not in found and "both" not in found]
    # An operation without a gradient has one pass to tune, and `both` is what it has.
    if "forward" in missing or (missing and direction == "backward"):
        decision = decide(call.op, call.abstract, platform=call.platform, chain=plan.chain)
        print_choice(out, decision.forward if missing[0] == "forward" else decision.backward)
        raise click.ClickException(f"no implementation serves the {missing[0]} pass, so there is nothing to tune")


def _print_result(out: Console, plan: Plan, call: Call, result: TuningResult, where: str) -> None:
    key, best = result.key, result.best.seconds or 0.0
    rule = _rule(plan, call, result)
    rows: list[tuple[Any, ...]] = []
    for rank, measured in enumerate(result.measurements, 1):
        style = "bold green" if rank == 1 else ""
        note = "the rule's" if measured.part == rule else ""
        if measured.seconds is None:
            rows.append(("-", given_values(measured.part), ("failed", "red"), "", measured.error))
        else:
            times = milliseconds(measured.seconds), f"{measured.seconds / best:.2f}"
            rows.append(((rank, style), (given_values(measured.part), style), *times, note))
    title = f"{call.op.name}, {key.direction}, {result.implementation} {where} {key.device}"
    print_table(
        out, title, "rank", "configuration", "ms", "of best", "note", rows=rows, right=["rank", "ms", "of best"]
    )


def _rule(plan: Plan, call: Call, result: TuningResult) -> Any:
    """What the heuristics would have taken, to be recognised in the table."""
    record = jax.eval_shape(call.op.lower, call.abstract)
    verdicts = plan.pick(record, "forward").verdicts
    implementation = next(v.implementation for v in verdicts if v.implementation.name == result.implementation)
    return implementation.config.heuristic(record, plan.device, result.key.direction)


def _stored(store: PersistentCache, results: list[TuningResult]) -> dict[str, Entry]:
    """The entries that tuning left in the store, as they ship: by the key they ship under, without defaults."""
    there = store.entries()
    lost = [result for result in results if str(result.key) not in there]
    if lost:
        raise click.ClickException(f"the measurements could not be stored: {store.path} cannot be written")
    return {
        r.key.shipped(r.kind): msgspec.structs.replace(there[str(r.key)], config=_set(r.best.part)) for r in results
    }


def _set(part: Any) -> dict[str, Any]:
    """The fields of a configuration part that differ from their defaults."""
    values = msgspec.to_builtins(part)
    return {f.name: values[f.name] for f in dataclasses.fields(part) if getattr(part, f.name) != f.default}


def _export(directory: Path, call: Call, results: list[TuningResult], entries: dict[str, Entry]) -> list[Path]:
    paths = list(dict.fromkeys(directory / table_name(result.key.device, call.op.name) for result in results))
    for path in paths:
        _merge(path, entries)
    return paths


def _merge(path: Path, entries: dict[str, Entry]) -> None:
    """Adds entries to a table that is kept under version control, and so has no lock file; never half written."""
    try:
        known = decode(path.read_bytes()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(encode(Table({**known, **entries})) + b"\n")
        os.replace(temporary, path)
    except DAMAGED as error:
        raise click.ClickException(f"{path} is no table of configurations: {error}") from error
    except OSError as error:
        raise click.ClickException(f"{path} cannot be used: {error}") from error
