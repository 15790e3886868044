"""Plants faults, one at a time, in a copy of the project, and tells which command catches each: `nox -s mutants`.

tests/mutants/faults.toml lists the faults, and tests/mutants/results.md has a row for each that has been tried. A fault
that is in the results is not tried again, unless `--again` asks for those that survived or `--names` names it.
`--piece 3/8` takes every eighth, from the third on, so that eight machines share the work. `--fast` runs the tests that
the list names for a file, and no others: first those that `nox -s tests` runs, then those that `nox -s thorough` adds.
Without it both commands run whole, each after the tests that the list names, until a test fails.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAULTS = ROOT / "tests" / "mutants" / "faults.toml"
RESULTS = ROOT / "tests" / "mutants" / "results.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".nox", "__pycache__", ".*_cache", "dist", "site")
FIRST, THOROUGH, SURVIVES, EQUIVALENT = "nox -s tests", "nox -s thorough", "survives", "equivalent"
PYTEST_ARGUMENTS = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=300")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of a line that some test must notice.

    Attributes:
        name: Its name, which results are kept under.
        file: Path in the project.
        kind: What goes wrong: a mask, a rescale, a lock ...
        old: The only such text in the file.
        new: What replaces it.
        tests: Files of tests to try first.
        ops: Operations of the conformance suite to try first.
        equivalent: Why no test can notice the change; empty where one can.
    """

    name: str
    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]
    ops: tuple[str, ...]
    equivalent: str = ""

    def is_stale(self, root: Path) -> bool:
        """Whether the text is not there exactly once: the source has changed since."""
        return (root / self.file).read_text(encoding="utf-8").count(self.old) != 1

    def plant(self, root: Path) -> None:
        """Makes the change in a copy of the project."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")

    def pytest_targets(self) -> Iterator[tuple[str, ...]]:
        """Arguments of pytest for the tests that are tried first."""
        if self.tests:
            yield self.tests
        if self.ops:
            suite = ("tests/conformance/test_suite_xla.py", "--ejk-impl=xla")
            yield (*suite, *(f"--ejk-op={op}" for op in self.ops))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault: the command that caught it, and the first test that failed."""

    fault: str
    command: str
    test: str

    def table_row(self) -> str:
        """Its row of the table of results."""
        return f"| {self.fault} | {self.command} | {self.test} |"


def read_faults() -> list[Fault]:
    """The list."""
    listed = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    equivalent = listed.get("equivalent", {})
    rows = [(group, row) for group in listed["group"] for row in group["faults"]]
    return [
        Fault(name, group["file"], kind, old, new, tuple(group["tests"]), tuple(group["ops"]), equivalent.get(name, ""))
        for group, (name, kind, old, new) in rows
    ]


class FaultyProject:
    """A copy of the project to plant faults in."""

    def __init__(self, folder: Path, plan_file: Path) -> None:
        self.root, self.plan_file, self.passing = folder / "project", plan_file, set[str]()
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED)
        sources = map(str, sorted(self.root.glob("packages/*/src")))
        # Before the editable installations, whose metadata stay in use.
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
        if not plan_file.exists():
            lines = self._run("-m", "pytest", "--collect-only", "-q", "--ejk-cover=first", "tests").stdout.splitlines()
            plan_file.write_text(json.dumps([line for line in lines if "::" in line]), encoding="utf-8")

    def try_fault(self, fault: Fault, only_listed_tests: bool) -> Outcome:
        """Plants a fault, runs tests until one fails that passes without it, and takes the fault out again."""
        path, outcome = self.root / fault.file, (SURVIVES, "")
        original, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)

        def restore() -> None:
            path.write_bytes(original)
            os.utime(path, ns=times)  # or stale bytecode would be taken for this file's

        for command, arguments in self._pytest_runs(fault, only_listed_tests):
            fault.plant(self.root)
            test = self._first_failed_test(*arguments)
            restore()
            if test and self._passes_without_fault(test):
                outcome = (command, test)
                break
        return Outcome(fault.name, *outcome)

    def _passes_without_fault(self, test: str) -> bool:
        """Whether a test passes where no fault is planted."""
        if test not in self.passing and not self._first_failed_test(test):
            self.passing.add(test)
        return test in self.passing

    def _pytest_runs(self, fault: Fault, only_listed_tests: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What is run until a test fails: arguments of pytest, and the command that they are a part of."""
        for command, cover, options in ((FIRST, "first", (f"--only={self.plan_file}",)), (THOROUGH, "second", ())):
            yield from ((command, (*target, *options)) for target in fault.pytest_targets())
            if not only_listed_tests:
                yield command, ("-n", "auto", "--maxprocesses", "4", f"--ejk-cover={cover}", "tests")

    def _first_failed_test(self, *arguments: str) -> str:
        """The first test that fails; empty where none does. A file that cannot be collected fails.

        Raises:
            RuntimeError: Pytest was called wrongly.
        """
        done = self._run(*PYTEST_ARGUMENTS, *arguments)
        if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return parse_failed_test(lines[0]) if lines else f"exit status {done.returncode}"

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, *arguments)
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)


def parse_failed_test(line: str) -> str:
    """The id of a test in a line of pytest's summary; its parameters may hold ` - `, which begins the message."""
    test = line.partition(" ")[2]
    function, bracket, rest = test.partition("[")
    if not bracket or " - " in function:
        return test.partition(" - ")[0]
    parameters, end, _ = rest.partition("] - ")
    return f"{function}[{parameters}]" if end else test


def count_by_command(outcomes: Sequence[Outcome]) -> str:
    """How many faults each command catches."""
    counts = Counter(outcome.command for outcome in outcomes)
    names = (FIRST, THOROUGH, SURVIVES, EQUIVALENT)
    return f"{len(outcomes)} faults: " + ", ".join(f"{name} {counts[name]}" for name in names)


def read_outcomes(path: Path = RESULTS) -> dict[str, Outcome]:
    """What earlier runs have written, by the names of faults; the last row counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| "))
    return {row[0]: Outcome(*row) for row in rows if row[0] != "Fault"}


def write_outcomes(outcomes: Iterable[Outcome], path: Path = RESULTS) -> None:
    """Writes the table anew, in the order of the list of faults."""
    place = {fault.name: index for index, fault in enumerate(read_faults())}
    ordered = sorted((outcome for outcome in outcomes if outcome.fault in place), key=lambda one: place[one.fault])
    head = ("# Which command catches which fault", "", "| Fault | Caught by | Test |", "|---|---|---|")
    path.write_text("\n".join((*head, *(outcome.table_row() for outcome in ordered), "")), encoding="utf-8")


def choose_faults(
    faults: Sequence[Fault], known_outcomes: Mapping[str, Outcome], options: Mapping[str, str]
) -> Iterator[Fault]:
    """The faults to try now; says of those that cannot be planted why."""
    piece, pieces = map(int, options.get("--piece", "1/1").split("/"))
    names = options["--names"].split(",") if "--names" in options else None
    again = "--again" in options
    for fault in faults[piece - 1 :: pieces]:
        tried = fault.name in known_outcomes and not (again and known_outcomes[fault.name].command == SURVIVES)
        if (fault.name not in names) if names is not None else tried:
            continue
        if fault.is_stale(ROOT):
            print(f"{fault.name} is out of date: {fault.file} has no {fault.old!r}", flush=True)
        else:
            yield fault


def main(arguments: Sequence[str]) -> int:
    """Runs a piece of the list.

    Args:
        arguments: `--piece K/N`, `--fast`, `--again`, `--names A,B`, `--plan FILE` (the ids of the first command's
            tests, written where it is not there), `--out FILE` (the table of results that a run continues).
    """
    options = dict(zip(arguments, (*arguments[1:], ""), strict=True))
    out = Path(options.get("--out", RESULTS)).absolute()
    faults, outcomes = read_faults(), read_outcomes(out)
    outcomes |= {fault.name: Outcome(fault.name, EQUIVALENT, fault.equivalent) for fault in faults if fault.equivalent}
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(options.get("--plan", f"{folder}/plan.json")).absolute()
        project = FaultyProject(Path(folder), plan_file)
        for fault in choose_faults(faults, outcomes, options):
            outcome = project.try_fault(fault, "--fast" in options)
            print(outcome.table_row(), flush=True)
            outcomes[fault.name] = outcome
            write_outcomes(outcomes.values(), out)
    write_outcomes(outcomes.values(), out)
    print(count_by_command(list(outcomes.values())))
    return int(any(outcome.command == SURVIVES for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
