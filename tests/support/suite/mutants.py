"""Plants faults, one at a time, in a copy of the project, and tells which command catches each: `nox -s mutants`.

tests/mutants/faults.toml lists the faults. `--piece 3/8` takes every eighth, from the third on, so that eight machines
share the work. `--fast` runs the tests that the list names for a file, and no others: first those that `nox -s tests`
runs, then the rest of them. Without it both commands run whole, after those, until a test fails.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAULTS = ROOT / "tests" / "mutants" / "faults.toml"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".nox", "__pycache__", ".*_cache", "dist", "site")
FIRST, THOROUGH, SURVIVES = "nox -s tests", "nox -s thorough", "survives"
COMMON = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of a line that some test must notice.

    Attributes:
        number: Its place in the list, from 1.
        file: Path in the project.
        kind: What goes wrong: a mask, a rescale, a lock ...
        old: The only such text in the file.
        new: What replaces it.
        tests: Files of tests to try first.
        ops: Operations of the conformance suite to try first.
    """

    number: int
    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]
    ops: tuple[str, ...]

    def is_stale(self, root: Path) -> bool:
        """Whether the text is not there exactly once: the source has changed since."""
        return (root / self.file).read_text(encoding="utf-8").count(self.old) != 1

    def plant(self, root: Path) -> None:
        """Makes the change in a copy of the project."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")

    def targets(self) -> Iterator[tuple[str, ...]]:
        """Arguments of pytest for the tests that are tried first."""
        if self.tests:
            yield self.tests
        if self.ops:
            suite = ("tests/conformance/test_suite_xla.py", "--ejk-impl=xla")
            yield (*suite, *(f"--ejk-op={op}" for op in self.ops))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault: the command that caught it, and the first test that failed."""

    fault: int
    command: str
    test: str
    seconds: float


def read_faults() -> list[Fault]:
    """The list."""
    groups = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["group"]
    rows = [(group, row) for group in groups for row in group["faults"]]
    return [
        Fault(number, group["file"], row[0], row[1], row[2], tuple(group["tests"]), tuple(group["ops"]))
        for number, (group, row) in enumerate(rows, 1)
    ]


class Workshop:
    """A copy of the project to plant faults in."""

    def __init__(self, folder: Path, plan: Path) -> None:
        self.root, self.plan = folder / "project", plan
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT)
        sources = map(str, sorted(self.root.glob("packages/*/src")))
        # Before the editable installations, whose metadata stay in use.
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
        if not plan.exists():
            lines = self._run("-m", "pytest", "--collect-only", "-q", "--ejk-cover=first", "tests").stdout.splitlines()
            plan.write_text(json.dumps([line for line in lines if "::" in line]), encoding="utf-8")

    def try_fault(self, fault: Fault, fast: bool) -> Outcome:
        """Plants a fault, runs tests until one fails that passes without it, and takes the fault out again."""
        path, began, outcome = self.root / fault.file, time.monotonic(), (SURVIVES, "")
        original, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)

        def restore() -> None:
            path.write_bytes(original)
            os.utime(path, ns=times)  # or stale bytecode would be taken for this file's

        for command, arguments in self._runs(fault, fast):
            fault.plant(self.root)
            test = self._failure(*arguments)
            restore()
            if test and not self._failure(test):
                outcome = (command, test)
                break
        return Outcome(fault.number, *outcome, round(time.monotonic() - began, 1))

    def _runs(self, fault: Fault, fast: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What is run until a test fails: arguments of pytest, and the command that they are a part of."""
        for command, options in ((FIRST, (f"--only={self.plan}",)), (THOROUGH, ())):
            yield from ((command, (*target, *options)) for target in fault.targets())
        if not fast:
            for command, cover in ((FIRST, "first"), (THOROUGH, "rest")):
                yield command, ("-n", "auto", "--maxprocesses", "4", f"--ejk-cover={cover}", "tests")

    def _failure(self, *arguments: str) -> str:
        """The first test that fails; empty where none does. A file that cannot be collected fails.

        Raises:
            RuntimeError: Pytest was called wrongly.
        """
        done = self._run(*COMMON, *arguments)
        if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return lines[0].partition(" ")[2].partition(" - ")[0] if lines else f"exit status {done.returncode}"

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, *arguments)
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)


def report(faults: Sequence[Fault], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The table: a line per fault, then how many each command catches."""
    by_number = {fault.number: fault for fault in faults}
    for outcome in outcomes:
        fault = by_number[outcome.fault]
        yield f"{fault.number:4} {outcome.command:15} {fault.kind:9} {fault.file}"
        yield f"{'':20} {fault.old.strip()} -> {fault.new.strip()}"
        yield f"{'':20} {outcome.test or 'no test fails'} ({outcome.seconds:.0f} s)"
    counts = Counter(outcome.command for outcome in outcomes)
    total = len(outcomes)
    yield f"{total} faults: " + ", ".join(f"{name} {counts[name]}" for name in (FIRST, THOROUGH, SURVIVES))


def read_outcomes(path: Path | None) -> list[Outcome]:
    """What an earlier run has written."""
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str]) -> int:
    """Runs a piece of the list.

    Args:
        arguments: `--piece K/N`, `--fast`, `--numbers 3,17`, `--plan FILE`, `--out FILE` (outcomes as JSON lines,
            which a later run continues).
    """
    options = dict(zip(arguments, (*arguments[1:], ""), strict=True))
    faults = read_faults()
    piece, pieces = map(int, options.get("--piece", "1/1").split("/"))
    chosen = faults[piece - 1 :: pieces]
    if "--numbers" in options:
        chosen = [faults[int(number) - 1] for number in options["--numbers"].split(",")]
    out = Path(options.get("--out", "")) if "--out" in options else None
    outcomes = read_outcomes(out)
    known = {outcome.fault for outcome in outcomes}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(options.get("--plan", f"{folder}/plan.json")).absolute()
        workshop = Workshop(Path(folder), plan)
        for fault in chosen:
            if fault.number in known:
                continue
            if fault.is_stale(ROOT):
                print(f"{fault.number:4} is out of date: {fault.file} has no {fault.old!r}", flush=True)
                continue
            outcomes.append(workshop.try_fault(fault, "--fast" in options))
            print(*report(faults, outcomes[-1:]), sep="\n", flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(outcomes[-1])) + "\n")
    print(*report(faults, outcomes), sep="\n")
    return int(any(outcome.command == SURVIVES for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
