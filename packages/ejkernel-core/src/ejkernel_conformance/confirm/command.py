"""The commands `run`, `merge`, `programs` and `carry`."""

import collections
import contextlib
import datetime
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ejkernel_conformance.confirm import carrying, merging, runner
from ejkernel_conformance.confirm import programs as lowering
from ejkernel_conformance.confirm.state import Result, Run, Writer, known_results, read

NAMES = "NAME"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Run every conformance test on this machine's device, and write evidence of it."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for state.jsonl and logs.")
@click.option("--resume", type=click.Path(path_type=Path, exists=True), multiple=True, help="State of earlier runs.")
@click.option("--minutes", default=9.0, show_default=True, help="Begin no further test after that.")
@click.option("--processes", default=max(1, (os.cpu_count() or 2) - 2), show_default=True, help="Worker processes.")
@click.option("--longest", default=300.0, show_default=True, help="Seconds after which a test counts as failed.")
@click.option("--first", multiple=True, metavar=NAMES, help="Implementations whose tests come first, in this order.")
@click.option("--impl", "implementations", multiple=True, metavar=NAMES, help="Run these alone (all of the device).")
@click.option("--op", "ops", multiple=True, metavar=NAMES, help="Run the tests of these operations alone (all).")
@click.option("--again", is_flag=True, help="Run tests again that failed in an earlier run.")
@click.pass_context
def run(ctx: click.Context, out: Path, resume: tuple[Path, ...], minutes: float, **options: Any) -> None:
    """Run tests until all have run or the time is up.

    Exits with 0 if every test has run and none failed, with 1 if one failed, and with 2 if some are left.
    """
    settings = runner.Settings(
        processes=options.pop("processes"),
        until=time.time() + 60 * minutes,
        longest=options.pop("longest"),
        logs=runner.default_logs(),
    )
    state = out / "state.jsonl"
    earlier = list(read([*resume, *([state] if state.exists() else [])]))
    with contextlib.closing(Writer(state)) as writer:
        this, results = _run(settings, writer, earlier, **options)
    left = _print_summary(this, results)
    failed = any(result.outcome == "failed" for result in results.values())
    ctx.exit(2 if left else 1 if failed else 0)


@main.command()
@click.argument("states", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1)
def merge(states: tuple[Path, ...]) -> None:
    """Write evidence files from state files, and mark evidence as stale whose sources have changed since.

    Results of sources that are no longer there are left out. Without state files, only the marks are renewed: an
    implementation with stale evidence comes after all that are confirmed, until it is confirmed again.
    """
    for path in merging.merge(read(states)):
        click.echo(path)


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write, or to continue.")
@click.option("--impl", "names", multiple=True, metavar=NAMES, help="These implementations alone (all with evidence).")
@click.option("--op", "ops", multiple=True, metavar=NAMES, help="These operations alone (all); too few for `carry`.")
@click.option("--chip", default="h200", show_default=True, help="The chip, which need not be there.")
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="Leave out what has that file's digest.")
@click.option("--texts", type=click.Path(path_type=Path), help="Folder for programs and kernels as text, to compare.")
def programs(**options: Any) -> None:
    """Lower every call that implementations serve, without a GPU, and write hashes of the programs.

    Triton has to be installed for its kernels; jax-triton and compiled C++ need not be. The programs of another tree
    are taken by the same file, run as a script with that tree's packages on the path:

    \b
        PYTHONPATH=$(echo OTHER/packages/*/src | tr ' ' ':') \\
            python packages/ejkernel-core/src/ejkernel_conformance/confirm/programs --out before.json --impl triton
        python3 -m ejkernel_conformance.confirm programs --out after.json --impl triton --against before.json
        python3 -m ejkernel_conformance.confirm carry before.json after.json
    """
    lowering.collect(**options)


@main.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("after", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--renamed", multiple=True, metavar="OLD=NEW", help="A family, an implementation or an FFI handler.")
@click.option("--partial", is_flag=True, help="Carry the rest where programs of an implementation differ.")
@click.pass_context
def carry(ctx: click.Context, before: Path, after: Path, renamed: tuple[str, ...], partial: bool) -> None:
    """Renew the digests of evidence where changed sources lower to the programs that a chip has confirmed.

    BEFORE has the programs of the sources that the evidence is about, AFTER those of the sources as they are. Where
    all programs of an implementation are the same, the evidence says that it was carried, from which sources, and how
    many programs were compared. Where one differs, is missing or is new, the evidence is marked as stale; with
    `--partial`, the tests of that call count as not run, and the others as they were.

    Exits with 1 if an implementation of both files could not be carried.
    """
    try:
        names = carrying.parse_renamed(renamed)
        result = carrying.carry(carrying.read(before), carrying.read(after), names, partial)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for line in result.lines:
        click.echo(line)
    for path in result.written:
        click.echo(path)
    ctx.exit(1 if result.refused else 0)


def _run(
    settings: runner.Settings,
    writer: Writer,
    earlier: list[Run],
    *,
    first: tuple[str, ...],
    implementations: tuple[str, ...],
    ops: tuple[str, ...],
    again: bool,
) -> tuple[Run, dict[str, Result]]:
    """Runs the tests that are left; returns the run and the results of all its tests, earlier ones included."""
    this = Run({"at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})
    with contextlib.closing(runner.Pool(settings)) as pool:
        runner.look(this, {"implementations": implementations, "ops": ops}, settings)
        known = known_results(this, earlier)
        if again:
            known = {name: result for name, result in known.items() if result.outcome != "failed"}
        click.echo(f"{this.about['device']['kind']}, {this.about['versions']}")
        click.echo(f"{len(this.tests)} tests, of which {len(known)} have run; logs in {settings.logs}")
        writer.begin(this)
        passes = runner.plan_passes((test for test in this.tests if test.id not in known), first)
        return this, known | pool.run(runner.Queue(passes), writer)


def _print_summary(this: Run, results: Mapping[str, Result]) -> int:
    """Prints what became of the tests of each implementation; returns how many are left."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    for test in this.tests:
        outcome = results[test.id].outcome if test.id in results else "left"
        counts.setdefault((test.implementation, test.family), collections.Counter())[outcome] += 1
    click.echo(f"\n{'implementation':<20} {'family':<22} {'passed':>7} {'failed':>7} {'refused':>8} {'left':>6}")
    for (implementation, family), count in sorted(counts.items()):
        columns = f"{count['passed']:>7} {count['failed']:>7} {count['refused']:>8} {count['left']:>6}"
        click.echo(f"{implementation:<20} {family:<22} {columns}")
    for test in this.tests:
        if test.id in results and results[test.id].outcome == "failed":
            click.echo(f"FAILED {test.id}: {results[test.id].message.splitlines()[0][:200]}")
    return sum(count["left"] for count in counts.values())
