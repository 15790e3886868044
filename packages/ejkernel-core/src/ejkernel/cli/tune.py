"""`ejkernel tune`."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import click
import jax
import msgspec
from rich.console import Console

from ejkernel.cli.cache import STORE
from ejkernel.cli.calls import Call, CallSpec, one_line_errors, takes_call
from ejkernel.cli.tables import console, milliseconds, print_choice, print_table
from ejkernel.ops.call import decide, make_plan
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import DAMAGED, Entry, Table, decode, encode, table_name
from ejkernel.ops.execution.tuner import Tuner, TunerError, TuningResult, tune_call
from ejkernel.ops.grad import Plan

DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@click.command()
@takes_call
@click.option("--direction", type=click.Choice(list(DIRECTIONS)), default="both", show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Samples of a candidate.")
@STORE
@click.option(
    "--export",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write a table that a backend can ship, <device kind>/<op>.json in this directory; merges.",
)
def tune(spec: CallSpec, direction: str, repeat: int, store: Path | None, export: Path | None) -> None:
    """Measure a call's configurations and store the best.

    What is tuned is the implementation that the call would use; --platform picks another.

    \b
    ejkernel tune flash_attention --shape 1,2048,8,64 -o causal=true
    """
    call, out = spec.one(), console()
    kept = PersistentCache(store)
    chain = ConfigSelectorChain(tuner=Tuner(timing_iterations=repeat, show_progress=True), persistent=kept)
    with one_line_errors():
        plan = make_plan(call.op, call.abstract, call.platform, None, chain)
        results = _measure(plan, call, direction, out)
    for result in results:
        _print_result(out, plan, call, result)
    entries = _stored(kept, results)
    click.echo(f"stored in {kept.path}")
    if export is not None:
        for path in _export(export, call, results, entries):
            click.echo(f"exported to {path}")


def _measure(plan: Plan, call: Call, direction: str, out: Console) -> list[TuningResult]:
    try:
        results = tune_call(plan, call.make(jax.random.key(0)), DIRECTIONS[direction])
    except TunerError as error:
        raise click.ClickException(str(error)) from error
    found = {result.key.direction for result in results}
    missing = [wanted for wanted in DIRECTIONS[direction] if wanted not in found]
    # An operation without a gradient has one pass to tune, and `both` is what it has.
    if "forward" in missing or (missing and direction == "backward"):
        decision = decide(call.op, call.abstract, platform=call.platform, chain=plan.chain)
        print_choice(out, decision.forward if missing[0] == "forward" else decision.backward)
        raise click.ClickException(f"no implementation serves the {missing[0]} pass, so there is nothing to tune")
    return results


def _print_result(out: Console, plan: Plan, call: Call, result: TuningResult) -> None:
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
    title = f"{call.op.name}, {key.direction}, {result.implementation} on {key.device}"
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
