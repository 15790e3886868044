"""Handing out tests to processes until all have run, or the time is up."""

import collections
import dataclasses
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_conformance.confirm.listing import SuiteTest, Unit, make_units
from ejkernel_conformance.confirm.process import WORKER, EndedError, Process, open_log
from ejkernel_conformance.confirm.state import Result, Run, Writer

GRACE = 20.0
"""Seconds that a test may go on after the time is up."""
STARTS = 3
"""Processes that may end one after the other before they are ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is made.

    Attributes:
        processes: Worker processes.
        until: The time at which no further test is begun.
        longest: Seconds after which a test counts as failed.
        logs: Folder of what the processes print.
        program: Arguments of Python for a worker.
    """

    processes: int
    until: float
    longest: float
    logs: Path
    program: Sequence[str] = WORKER


class Queue:
    """Units that are left, in passes: units of a pass are taken only after all of the one before."""

    def __init__(self, passes: Sequence[Sequence[Unit]]) -> None:
        self._passes = [list(units) for units in passes]
        self._at = collections.Counter[str]()
        self._lock = threading.Lock()

    def take(self, op: str) -> Unit | None:
        """Returns the next unit for a process that was at an operation, whose cases it has at hand."""
        with self._lock:
            units = next((units for units in self._passes if units), None)
            if units is None:
                return None
            chosen = units[0] if units[0].long else self._short(units, op)
            units.remove(chosen)
            self._at[op] -= 1
            self._at[chosen.op] += 1
            return chosen

    def _short(self, units: Sequence[Unit], op: str) -> Unit:
        """Returns a unit of the same operation, or of the one that has most units for each process that is at it."""
        left = collections.Counter(unit.op for unit in units)
        most = op if left[op] else max(left, key=lambda name: left[name] / (1 + self._at[name]))
        return next(unit for unit in units if unit.op == most)


def plan_passes(tests: Iterable[SuiteTest], first: Sequence[str]) -> list[list[Unit]]:
    """Units in passes: the implementations named first, in that order, then all others together."""
    remaining = list(tests)
    passes: list[list[Unit]] = []
    for name in first:
        passes.append(make_units(test for test in remaining if test.implementation == name))
        remaining = [test for test in remaining if test.implementation != name]
    return [*passes, make_units(remaining)]


def look(about: Run, request: Mapping[str, Any], settings: Settings) -> None:
    """Fills in what the device, the toolchain and the tests of this machine are, from a process that looks.

    Args:
        about: What is filled in.
        request: Which tests, in the words of the worker.
        settings: How the run is made.

    Raises:
        EndedError: The process ended.
    """
    with open_log(settings.logs, "listing.log") as log:
        process = Process(log, settings.program)
        try:
            process.receive(settings.until)
            process.send(list=dict(request))
            message = process.receive(settings.until)
        finally:
            process.end()
    about.tests = [SuiteTest(*fields) for fields in message.pop("tests")]
    about.about |= message


class Pool:
    """Worker processes, which start to import while the tests are listed."""

    def __init__(self, settings: Settings) -> None:
        self._workers = [_Worker(number, settings) for number in range(settings.processes)]

    def run(self, queue: Queue, writer: Writer) -> dict[str, Result]:
        """Runs what is in the queue; returns the results that were reached."""
        threads = [threading.Thread(target=worker.work, args=(queue, writer)) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: result for worker in self._workers for name, result in worker.results.items()}

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.end()


class _Worker:
    """A thread that keeps one process at work, and starts another where one ends."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self.results: dict[str, Result] = {}
        self._settings = settings
        self._log = open_log(settings.logs, f"worker_{number}.log")
        self._process = Process(self._log, settings.program)
        self._ready = False

    def work(self, queue: Queue, writer: Writer) -> None:
        """Takes units until there are none or the time is up."""
        op, until = "", self._settings.until
        while time.time() < until and (unit := queue.take(op)):
            op = unit.op
            while unit.tests and time.time() < until:
                if not self._ready and not self._start():
                    return
                self._run_unit(unit, writer)

    def end(self) -> None:
        """Ends its process."""
        self._process.end()
        self._log.close()

    def _run_unit(self, unit: Unit, writer: Writer) -> None:
        """Runs the tests of a unit that are left, until one ends the process or the time is up."""
        running, began = "", time.time()
        try:
            self._process.send(run=[dataclasses.astuple(test) for test in unit.tests], until=self._settings.until)
            while "done" not in (message := self._process.receive(self._last_moment())):
                if "begin" in message:
                    running, began = message["begin"], time.time()
                else:
                    running, result = "", Result(*(message[name] for name in ("outcome", "seconds", "message")))
                    self._note(unit, writer, message["end"], result)
        except EndedError as error:
            self._process.end()
            self._ready = False
            # One that was cut because the time is up runs again in the next run.
            if running and time.time() < self._settings.until + GRACE:
                self._note(unit, writer, running, Result("failed", round(time.time() - began, 2), f"crash: {error}"))

    def _last_moment(self) -> float:
        """Returns the time at which a process that sends no message is ended."""
        return min(time.time() + self._settings.longest, self._settings.until + GRACE)

    def _note(self, unit: Unit, writer: Writer, test: str, result: Result) -> None:
        unit.tests = [each for each in unit.tests if each.id != test]
        self.results[test] = result
        writer.result(test, result)
        if result.outcome == "failed":
            lines = result.message.splitlines()
            print(f"FAILED {test}: {lines[0][:300] if lines else ''}", file=sys.stderr, flush=True)

    def _start(self) -> bool:
        """Waits for the process to be ready, or for another; returns whether there is one."""
        for attempt in range(STARTS):
            if attempt or self._process.ended:
                self._process = Process(self._log, self._settings.program)
            try:
                self._process.receive(self._last_moment())
            except EndedError as error:
                print(f"worker {self.number}: {error}; see {self._log.name}", file=sys.stderr, flush=True)
                self._process.end()
                continue
            self._ready = True
            return True
        return False


def default_logs() -> Path:
    """Returns a folder for what processes print where none is named."""
    return Path(tempfile.mkdtemp(prefix="ejkernel_confirm_"))
