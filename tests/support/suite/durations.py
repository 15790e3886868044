"""Where the time of a run goes: `--durations-by-kind` prints it per file, `--record-costs` writes what tests cost.

Seconds are those of a processor, the test's process and those that it started and awaited. JAX reports how long it
traced, lowered and compiled; their shares of a test's time are those of its seconds, and the rest is `run`. What a
process takes before its first test, to import and to collect all tests, is in a line of its own.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from time import perf_counter
from typing import Any

import jax
import pytest

from suite.selection import CHEAP_SECONDS, COSTS_FILE
from suite.servers import seconds_of_servers

KIND_BY_JAX_EVENT = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}
TABLE_COLUMNS = ("import", "trace", "lower", "compile", "run", "processes")
SECONDS_PROPERTY = "seconds by kind"
STARTUP_ROW = "imports and collection, of each process that runs tests"


def _processor_seconds() -> tuple[float, float]:
    times = os.times()
    children = times.children_user + times.children_system + seconds_of_servers()
    return times.user + times.system, children


class DurationRecorder:
    """Measures each test in the process that runs it, and gathers what the processes of a run report."""

    def __init__(self) -> None:
        self.events = defaultdict[str, float](float)
        self.tests: dict[str, dict[str, float]] = {}
        self.began = False
        jax.monitoring.register_event_duration_secs_listener(self._add_jax_event)

    def _add_jax_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if kind := KIND_BY_JAX_EVENT.get(event.rpartition("/")[2]):
            self.events[kind] += duration_secs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Notes what a test's body takes."""
        yield from self._measure(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Notes what a test's fixtures take."""
        yield from self._measure(item)

    def _measure(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.events.clear()
        (own, children), began = _processor_seconds(), perf_counter()
        result = yield
        (own_after, children_after), wall = _processor_seconds(), perf_counter() - began
        busy = min(1.0, (own_after - own) / wall) if wall else 0.0
        seconds = {kind: spent * busy for kind, spent in self.events.items()}
        seconds["run"] = max(0.0, own_after - own - sum(seconds.values()))
        seconds["processes"] = children_after - children
        if not self.began:
            self.began, seconds["import"] = True, own
        item.user_properties.append((SECONDS_PROPERTY, seconds))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gathers what a test has noted, wherever it ran."""
        if report.when != "teardown":
            return
        total = self.tests.setdefault(report.nodeid, defaultdict(float))
        noted: list[Any] = [seconds for name, seconds in report.user_properties if name == SECONDS_PROPERTY]
        for seconds in noted:
            for kind, spent in seconds.items():
                total[kind] += spent

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Prints the table, and writes the costs."""
        if config.getoption("--durations-by-kind"):
            for line in self.table_lines():
                terminalreporter.write_line(line)
        if config.getoption("--record-costs"):
            self.write_costs()

    def table_lines(self) -> Iterator[str]:
        """A line per file, the most expensive first."""
        files = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
        for test, seconds in self.tests.items():
            for kind, spent in seconds.items():
                files[STARTUP_ROW if kind == "import" else test.partition("::")[0]][kind] += spent
        total = {kind: sum(seconds[kind] for seconds in files.values()) for kind in TABLE_COLUMNS}
        yield f"{'seconds':>9} " + " ".join(f"{kind:>9}" for kind in TABLE_COLUMNS)
        ranked = sorted(files.items(), key=lambda row: -sum(row[1].values()))
        for file, seconds in [("all files", total), *ranked]:
            yield (
                f"{sum(seconds.values()):9.1f} "
                + " ".join(f"{seconds[kind]:9.1f}" for kind in TABLE_COLUMNS)
                + f" {file}"
            )

    def write_costs(self) -> None:
        """Writes the mean cost of each function that ran; those of functions that did not run stay."""
        spent = defaultdict[str, list[float]](list)
        for test, seconds in self.tests.items():
            spent[test.partition("[")[0]].append(sum(seconds[kind] for kind in TABLE_COLUMNS if kind != "import"))
        costs = json.loads(COSTS_FILE.read_text(encoding="utf-8")) if COSTS_FILE.exists() else {}
        means = {function: sum(each) / len(each) for function, each in spent.items()}
        kept = {function: cost for function, cost in costs.items() if function not in means}
        kept |= {function: round(mean, 2) for function, mean in means.items() if mean > CHEAP_SECONDS}
        COSTS_FILE.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", encoding="utf-8")
