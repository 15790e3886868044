"""The command `run`."""

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ejkernel.arithmetic import cdiv
from ejkernel_conformance.confirm import runner
from ejkernel_conformance.confirm.listing import SuiteTest
from ejkernel_conformance.confirm.state import Result, Run, Writer, read
from ejkernel_conformance.random_calls.loops import VARIABLE

WORKER = ("-m", "ejkernel_conformance.random_calls.worker")
VALUES = 6
"""Calls of a program."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compare calls drawn at random with what they mean."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for calls.jsonl.")
@click.option("--calls", default=2000, show_default=True, help="How many calls, of all operations together.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other programs.")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Draw calls of these operations alone (all).")
@click.option("--only", metavar="SEED:OP:NUMBER", help="Run one program, as it is named where it failed.")
@click.option("--loops", type=click.Path(path_type=Path, exists=True), help="File with independent loops (LOOPS).")
@click.option("--minutes", default=9.0, show_default=True, help="Begin no further program after that.")
@click.option("--processes", default=max(1, (os.cpu_count() or 2) - 1), show_default=True, help="Worker processes.")
@click.option("--longest", default=240.0, show_default=True, help="Seconds after which a program counts as failed.")
@click.pass_context
def run(ctx: click.Context, out: Path, seed: int, ops: tuple[str, ...], only: str | None, **options: Any) -> None:
    """Run programs until all have run or the time is up; one that has run before in the same folder is left out.

    Exits with 0 if every call is right, with 1 if one is wrong, and with 2 if programs are left.
    """
    if options["loops"]:
        os.environ[VARIABLE] = str(options["loops"].resolve())
    settings = runner.Settings(
        processes=1 if only else options["processes"],
        until=time.time() + 60 * options["minutes"],
        longest=options["longest"],
        logs=runner.default_logs(),
        program=WORKER,
    )
    state = out / "calls.jsonl"
    earlier = list(read([state])) if state.exists() else []
    this = Run({"at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})
    count = 1 if only else cdiv(options["calls"], VALUES)
    with contextlib.closing(Writer(state)) as writer, contextlib.closing(runner.Pool(settings)) as pool:
        runner.look(this, {"ops": list(ops), "seed": seed, "programs": count}, settings)
        if only:
            this.tests = [SuiteTest(only, "", "default", only.split(":")[1], only)]
        known = {} if only else _known(this, earlier)
        click.echo(f"{this.about['device']['kind']}, {this.about['versions']}, seed {seed}; logs in {settings.logs}")
        writer.begin(this)
        queue = runner.Queue(runner.plan_passes((test for test in this.tests if test.id not in known), ()))
        results = known | pool.run(queue, writer)
    print_summary(this.tests, results)
    left = sum(test.id not in results for test in this.tests)
    ctx.exit(2 if left else 1 if any(result.outcome == "failed" for result in results.values()) else 0)


def _known(this: Run, earlier: Iterable[Run]) -> dict[str, Result]:
    names = {test.id for test in this.tests}
    same = [other for other in earlier if other.toolchain == this.toolchain]
    return {name: result for other in same for name, result in other.results.items() if name in names}


def print_summary(tests: Iterable[SuiteTest], results: dict[str, Result]) -> None:
    """Prints a row for each operation, and for each failure the command that repeats it."""
    rows: dict[str, list[Result | None]] = {}
    for test in tests:
        rows.setdefault(test.op, []).append(results.get(test.id))
    headings = ("calls", "wrong", "left", "no gradient", "loose", "by loops", "error", "XLA's")
    click.echo(f"\n{'operation':<40}" + "".join(f"{heading:>12}" for heading in headings) + "  implementations")
    for op, found in sorted(rows.items()):
        click.echo(_row(op, found))
    for name, result in results.items():
        if result.outcome == "failed":
            command = f"python3 -m ejkernel_conformance.random_calls run --out again --only {name}"
            click.echo(f"WRONG {name}: {result.message.splitlines()[0][:400]}\n  {command}")


def _row(op: str, results: list[Result | None]) -> str:
    found = [json.loads(x.message) for x in results if x is not None and x.outcome == "passed"]
    wrong = sum(x is not None and x.outcome == "failed" for x in results)
    largest = [max((x[name] for x in found), default=0.0) for name in ("error", "xla_error")]
    sums = [sum(x["calls"] for x in found), wrong, results.count(None), sum(bool(x["refused"]) for x in found)]
    sums += [sum(x.get(name, 0) for x in found) for name in ("loose", "loops")]
    names = sorted({name for x in found for name in x["implementation"].split(", ")})
    return (
        f"{op:<40}"
        + "".join(f"{n:>12}" for n in sums)
        + "".join(f"{x:>12.2g}" for x in largest)
        + f"  {', '.join(names)}"
    )
