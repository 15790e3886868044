"""Which tests run here and by which command; tests/support/suite/ has the rules, docs/testing.md tells of them."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from suite import arrays, draws, needs, operations, selection
from suite.mutants import FIRST
from suite.state import SharedStateGuard

# Two runs of a test try the same examples, and a busy machine is no failure.
SLOW = [HealthCheck.too_slow]
settings.register_profile("ejkernel", derandomize=True, database=None, deadline=None, suppress_health_check=SLOW)
settings.load_profile("ejkernel")
draws.install()
arrays.install()
operations.install()

NOTES = "ejkernel_notes"
_notes = pytest.StashKey[list[str]]()
_left_out = pytest.StashKey[int]()
_guard = SharedStateGuard()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the sessions of noxfile.py ask for."""
    group = parser.getgroup("ejkernel")
    group.addoption("--plan", action="store_true", help="print which tests a command runs, and run none")
    group.addoption("--durations-by-kind", action="store_true", help="print per file what tracing, compiling ... took")
    group.addoption("--shuffle", metavar="SEED", type=int, help="run files, and the tests in them, in another order")
    group.addoption("--only", metavar="FILE", help="run only tests whose ids are in this JSON file")
    group.addoption("--needs", metavar="NAME", help="run only tests that are marked to need this")
    group.addoption("--record-costs", action="store_true", help="write what tests cost to tests/support/suite/")


def pytest_configure(config: pytest.Config) -> None:
    """Measure tests where that is asked for."""
    if config.getoption("--durations-by-kind") or config.getoption("--record-costs"):
        from suite.durations import DurationRecorder

        config.pluginmanager.register(DurationRecorder())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the suite that have caught a fault: its covering designs have them."""
    if item.nodeid in selection.tests_that_caught_faults(FIRST):
        item.add_marker("ejk_first")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and what belongs to other commands."""
    if path := config.getoption("--only"):
        ids = set(json.loads(Path(str(path)).read_text(encoding="utf-8")))
        items[:] = [item for item in items if item.nodeid in ids]
    command = config.getoption("--ejk-cover")
    if command != "all":
        # Before tests are left out that cannot run here, so that the commands divide the same tests wherever they run.
        _select(config, items, str(command))
    config.stash[_notes] = needs.remove_tests_with_unmet_needs(items, config.getoption("--needs"))
    if (seed := config.getoption("--shuffle")) is not None:
        selection.shuffle_in_groups(items, seed)
    elif command != "all" or hasattr(config, "workerinput"):  # a process of a run in parallel
        selection.move_long_tests_first(items)


def _select(config: pytest.Config, items: list[pytest.Item], command: str) -> None:
    """Leave out the tests of other commands."""
    from ejkernel_conformance.plugin import parameter_of

    # The suite's own tests have been selected by its plugin.
    suite = [item for item in items if parameter_of(item) is not None]
    others = [item for item in items if parameter_of(item) is None]
    left = selection.remove_tests_of_other_commands(others, command)
    kept = {*suite, *others}
    items[:] = [item for item in items if item in kept]
    config.stash[_left_out] = len(left)
    config.hook.pytest_deselected(items=left)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With `--plan`, print the tests instead of running them."""
    if not session.config.getoption("--plan"):
        return None
    print("", *selection.plan_lines(session.items, session.config.stash.get(_left_out, 0)), sep="\n")
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Note what tests share before the fixtures of a test change it."""
    _guard.begin_test(getattr(item, "module", None))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Restore it after the fixtures."""
    try:
        return (yield)
    finally:
        _guard.end_test(nextitem is None or nextitem.path != item.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself fails: what cannot run here is marked with what it needs, and is not collected."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skips itself; mark what it needs with pytest.mark.needs: tests/support/suite"
    return report


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what cannot run here."""
    return config.stash.get(_notes, [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand that from a worker of pytest-xdist to the process that reports: only workers collect tests."""
    if getattr(session.config, "workerinput", {}).get("workerid") == "gw0":
        session.config.workeroutput[NOTES] = session.config.stash.get(_notes, [])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep a worker's lines for the report."""
    node.config.stash.setdefault(_notes, []).extend(getattr(node, "workeroutput", {}).get(NOTES, []))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the lines of a worker."""
    if config.pluginmanager.has_plugin("dsession"):
        for line in config.stash.get(_notes, []):
            terminalreporter.write_line(line)
