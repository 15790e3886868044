"""The state file of runs: JSON lines, appended as tests end, so that nothing is lost where a run is cut.

A run begins with a line about itself (`{"run": ...}`) and one for the tests that there are; lines for tests follow.
"""

import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel_conformance.confirm.listing import SuiteTest

COMPILED_WITH = ("jax", "jaxlib", "jax_triton", "triton", "cuda", "cudnn")
"""The versions that results may depend on: runs with others are runs of another toolchain."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a test: `"passed"`, `"failed"` or `"refused"`."""

    outcome: str
    seconds: float
    message: str = ""


@dataclasses.dataclass
class Run:
    """The results of one run.

    Attributes:
        about: Device, versions, digests and time.
        tests: The tests that there were.
        results: Test id -> what became of it.
    """

    about: dict[str, Any]
    tests: list[SuiteTest] = dataclasses.field(default_factory=list[SuiteTest])
    results: dict[str, Result] = dataclasses.field(default_factory=dict[str, Result])

    @property
    def toolchain(self) -> str:
        """Returns the device and the versions as text. Runs with equal text used the same toolchain."""
        versions: Mapping[str, str] = self.about["versions"]
        return json.dumps([self.about["device"], {name: versions.get(name) for name in COMPILED_WITH}], sort_keys=True)

    def digest(self, test: SuiteTest) -> str | None:
        """Returns the digest of the sources that a test ran."""
        return self.about["digests"].get(f"{test.family}/{test.implementation}")


class Writer:
    """Appends to a state file, from several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def begin(self, run: Run) -> None:
        """Writes the lines that a run begins with."""
        self._write({"run": run.about})
        self._write({"tests": [dataclasses.astuple(test) for test in run.tests]})

    def result(self, test: str, result: Result) -> None:
        """Writes what became of a test."""
        self._write({"test": test, **dataclasses.asdict(result)})

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()


def read(paths: Iterable[Path]) -> Iterator[Run]:
    """Yields the runs in state files. A last line that was cut is left out.

    Raises:
        ValueError: A file is not a state file.
    """
    for path in paths:
        run: Run | None = None
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the process was ended while it wrote
                continue
            if "run" in line:
                if run is not None:
                    yield run
                run = Run(line["run"])
            elif run is None:
                raise ValueError(f"state: {path} does not begin with a run, got {text[:80]!r}")
            elif "tests" in line:
                run.tests = [SuiteTest(*fields) for fields in line["tests"]]
            else:
                test = line.pop("test")
                run.results[test] = Result(**line)
        if run is not None:
            yield run


def known_results(run: Run, earlier: Iterable[Run]) -> dict[str, Result]:
    """Returns what earlier runs found about a run's tests: with the same toolchain, device and sources. The last one
    counts.
    """
    found: dict[str, Result] = {}
    for other in earlier:
        if other.toolchain != run.toolchain:
            continue
        same = [test.id for test in run.tests if other.digest(test) == run.digest(test)]
        found |= {name: other.results[name] for name in same if name in other.results}
    return found
