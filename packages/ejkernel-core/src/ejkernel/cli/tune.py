"""Implements `ejkernel tune`."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click
import jax
import msgspec
from click.core import ParameterSource
from rich.console import Console

from ejkernel.cli.as_json import JSON_OPTION, print_json
from ejkernel.cli.cache import STORE_OPTION, merge_into_file
from ejkernel.cli.calls import Call, CallOptions, add_call_options, calls_from_file, one_line_errors
from ejkernel.cli.tables import format_milliseconds, open_console, print_choice, print_table, print_unmarked_text
from ejkernel.cli.targets import find_target
from ejkernel.errors import TunerError
from ejkernel.ops.call import decide, make_plan
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.measurement import Measurement, TuningResult
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import Entry, table_name
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.device import target_device
from ejkernel.ops.execution.target import Target, tune_by_prediction
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.params import Direction, set_fields_as_text
from ejkernel.ops.tuning import tune_call

TARGET_HELP = (
    "Predict times for this device instead of measuring on this machine: v5e, v5p, v6e or v7x, with "
    "ejkernel-pallas[aot]. Predictions are stored apart from measurements."
)
CALLS_HELP = "Tune the calls in this file, which ejkernel.ops.save_recorded writes. With OP, only the calls of OP."
EXPORT_HELP = (
    "Also write the results into a table that a backend can ship, <device kind>/<op>.json in this directory. Entries "
    "that the table already has are kept."
)
DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Holds the options that do not describe the call.

    Attributes:
        direction: A key of `DIRECTIONS`.
        repeat: Number of samples of each candidate.
        target: Device to predict for; None measures on this machine.
        export: Folder of the tables to write as well.
        as_json: Whether to print JSON.
    """

    direction: str
    repeat: int
    target: str | None
    export: Path | None
    as_json: bool


@click.command()
@functools.partial(add_call_options, required=False)
@click.option("--calls", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=CALLS_HELP)
@click.option(
    "--direction", type=click.Choice(list(DIRECTIONS)), default="both", show_default=True, help="Passes to tune."
)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Number of samples of each candidate."
)
@click.option("--target", metavar="NAME", help=TARGET_HELP)
@STORE_OPTION
@click.option("--export", type=click.Path(file_okay=False, path_type=Path), help=EXPORT_HELP)
@JSON_OPTION
@click.pass_context
def tune(
    ctx: click.Context, call_options: CallOptions | None, file: Path | None, store: Path | None, **options: Any
) -> None:
    """Measure the configurations of a call and store the fastest.

    Times the candidate configurations of the implementation that the call would use, in turn. --platform selects
    another implementation. If the fastest candidate is not faster than the configuration that the heuristic chooses by
    more than the spread of the samples, the heuristic's configuration is stored.

    \b
    ejkernel tune flash_attention --shape 1,2048,8,64 -o causal=true
    ejkernel tune --calls calls.json
    """
    tuning_options = TuningOptions(**options)
    if tuning_options.target is not None and ctx.get_parameter_source("repeat") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--repeat has no effect with --target: a prediction needs one run")
    calls, out = _calls_to_tune(call_options, file), open_console(stderr=tuning_options.as_json)
    measured_store = PersistentCache(path=store)
    store_of_results = measured_store.predicted if tuning_options.target else measured_store
    results: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    for number, call in enumerate(calls, 1):
        if file is not None and not tuning_options.as_json:
            print_unmarked_text(out, f"{number} of {len(calls)}: {call.op.name}, {call.label}", "bold")
        try:
            results += _tune_call(call, tuning_options, measured_store, store_of_results, out)
        except click.ClickException as error:
            if file is None:
                raise
            failures.append({"call": f"{call.op.name}, {call.label}", "error": error.format_message()})
    _print_results(results, failures, store_of_results, tuning_options)
    if failures:
        ctx.exit(1)


def _calls_to_tune(call_options: CallOptions | None, file: Path | None) -> list[Call]:
    """Returns the calls of the file, or the one that the command line describes."""
    if file is None:
        if call_options is None:
            raise click.UsageError("give the operation, OP, or --calls")
        return [call_options.one()]
    if call_options is not None and (call_options.are_shapes_described or call_options.cases or call_options.platform):
        raise click.UsageError("--calls has its own shapes, options and platforms; use either --calls or the others")
    calls = calls_from_file(file, None if call_options is None else call_options.op)
    if not calls:
        raise click.UsageError(
            f"--calls: {file} has no calls" + ("" if call_options is None else f" of {call_options.op.name}")
        )
    return calls


def _tune_call(
    call: Call,
    tuning_options: TuningOptions,
    measured_store: PersistentCache,
    store_of_results: PersistentCache,
    out: Console,
) -> list[dict[str, Any]]:
    """Tunes one call, stores and exports the results, and returns them as plain data."""
    with one_line_errors():
        if tuning_options.target is None:
            results, plan = _tune_by_measuring(call, tuning_options, measured_store, out)
        else:
            results, plan = _tune_by_predicting(
                call, tuning_options.direction, find_target(tuning_options.target), measured_store, out
            )
    if not tuning_options.as_json:
        for result in results:
            _print_result(out, call, result, "predicted for" if tuning_options.target else "on")
    entries = _table_to_ship(store_of_results, results)
    paths = [] if tuning_options.export is None else _export_table(tuning_options.export, call, results, entries)
    exported = list(map(str, paths))
    how = "predicted" if tuning_options.target else "measured"
    return [
        {"call": call.label, "how": how, **_result_to_dict(plan, result), "exported": exported} for result in results
    ]


def _print_results(
    results: list[dict[str, Any]], failures: list[dict[str, str]], store: PersistentCache, tuning_options: TuningOptions
) -> None:
    if tuning_options.as_json:
        print_json({"store": str(store.path), "results": results, "failed": failures})
        return
    if results:
        click.echo(f"stored in {store.path}")
    for path in dict.fromkeys(path for result in results for path in result["exported"]):
        click.echo(f"exported to {path}")
    for failure in failures:
        click.echo(f"not tuned: {failure['call']}: {failure['error']}")


def _result_to_dict(plan: CallPlan, result: TuningResult) -> dict[str, Any]:
    """Converts a result to plain data."""
    return {
        "operation": plan.op.name,
        "implementation": result.implementation,
        "direction": result.key.direction,
        "device": result.key.device,
        "key": str(result.key),
        "winner": msgspec.to_builtins(result.winner.part),
        "rule": None if result.heuristic_part is None else msgspec.to_builtins(result.heuristic_part),
        "measurements": [
            {
                "config": msgspec.to_builtins(m.part),
                "seconds": m.seconds,
                "spread": m.spread,
                "samples": m.samples,
                "error": m.error,
            }
            for m in result.measurements
        ],
    }


ResultsAndPlan = tuple[list[TuningResult], CallPlan]


def _tune_by_measuring(
    call: Call, tuning_options: TuningOptions, measured_store: PersistentCache, out: Console
) -> ResultsAndPlan:
    """Measures on this machine's device."""
    show_progress = sys.stderr.isatty()
    chain = ConfigSelectorChain(
        tuner=Tuner(timing_iterations=tuning_options.repeat, show_progress=show_progress), persistent=measured_store
    )
    plan = make_plan(call.op, call.abstract_args, call.platform, None, chain)
    directions = DIRECTIONS[tuning_options.direction]
    with _one_line_tuner_errors():
        args = call.make_args(jax.random.key(0))
        results = tune_call(plan, args, directions, mesh=call.mesh, in_specs=call.in_specs)
    _check_served(plan, call, tuning_options.direction, results, out)
    return results, plan


def _tune_by_predicting(
    call: Call, direction: str, target: Target, measured_store: PersistentCache, out: Console
) -> ResultsAndPlan:
    """Predicts for a device that need not be in this machine."""
    if call.mesh is not None:
        raise click.ClickException("a call with a mesh cannot be predicted for a --target")
    with _one_line_tuner_errors():
        chain = ConfigSelectorChain(tuner=target.tuner(sys.stderr.isatty()), persistent=measured_store)
        with target_device(target.device):
            plan = make_plan(call.op, call.abstract_args, call.platform, None, chain)
        results = tune_by_prediction(plan, call.make_args, DIRECTIONS[direction])
    with target_device(target.device):
        _check_served(plan, call, direction, results, out)
    return results, plan


@contextlib.contextmanager
def _one_line_tuner_errors() -> Generator[None]:
    try:
        yield
    except TunerError as error:
        raise click.ClickException(str(error)) from error


def _check_served(plan: CallPlan, call: Call, direction: str, results: list[TuningResult], out: Console) -> None:
    """Raises an error if no kernel supports a pass that the user wants to tune."""
    tuned = {result.key.direction for result in results}
    missing = [one for one in DIRECTIONS[direction] if one not in tuned and "both" not in tuned]
    # An operation without a gradient has one pass to tune, and then `both` means that pass.
    if "forward" in missing or (missing and direction == "backward"):
        decision = decide(call.op, call.abstract_args, platform=call.platform, chain=plan.chain)
        print_choice(out, decision.forward if missing[0] == "forward" else decision.backward)
        raise click.ClickException(f"no implementation supports the {missing[0]} pass, so there is nothing to tune")


def _print_result(out: Console, call: Call, result: TuningResult, preposition: str) -> None:
    key, best, winner = result.key, result.fastest.seconds or 0.0, result.winner
    rows: list[tuple[Any, ...]] = []
    for rank, measured in enumerate(result.measurements, 1):
        style = "bold green" if measured is winner else ""
        if measured.seconds is None:
            rows.append(("-", set_fields_as_text(measured.part), ("failed", "red"), "", "", measured.error))
            continue
        spread = format_milliseconds(measured.spread) if measured.samples else "-"
        times = format_milliseconds(measured.seconds), spread, f"{measured.seconds / best:.2f}"
        rows.append(
            ((rank, style), (set_fields_as_text(measured.part), style), *times, _candidate_note(result, measured))
        )
    title = f"{call.op.name}, {key.direction}, {result.implementation} {preposition} {key.device}"
    headings = ("rank", "configuration", "ms", "spread", "relative", "note")
    print_table(
        out,
        title,
        *headings,
        rows=rows,
        right_aligned_columns=["rank", "ms", "spread", "relative"],
        folded_columns=["note"],
    )


def _candidate_note(result: TuningResult, measurement: Measurement) -> str:
    """Marks the candidate that the heuristic chooses, and says why it is stored if it is not the fastest."""
    if measurement.part != result.heuristic_part:
        return ""
    keeps_config = measurement is result.winner and measurement is not result.fastest
    return "heuristic, stored: the fastest is not faster by more than the spread" if keeps_config else "heuristic"


def _table_to_ship(store: PersistentCache, results: list[TuningResult]) -> dict[str, Entry]:
    """Returns the stored entries as a table that ships: by the key they ship under, without defaults."""
    stored = store.entries()
    not_stored = [result for result in results if str(result.key) not in stored]
    if not_stored:
        raise click.ClickException(f"the measurements could not be stored: {store.path} cannot be written")
    return {
        r.key.as_shipped_key(r.kind): msgspec.structs.replace(
            stored[str(r.key)], config=_non_default_fields(r.winner.part)
        )
        for r in results
    }


def _non_default_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from their defaults."""
    values = msgspec.to_builtins(config)
    return {f.name: values[f.name] for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}


def _export_table(directory: Path, call: Call, results: list[TuningResult], entries: dict[str, Entry]) -> list[Path]:
    paths = list(dict.fromkeys(directory / table_name(result.key.device, call.op.name) for result in results))
    for path in paths:
        merge_into_file(path, entries)
    return paths
