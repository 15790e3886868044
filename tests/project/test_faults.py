"""The list of faults that `nox -s mutants` plants is true to the sources."""

import dataclasses
from collections import Counter
from pathlib import Path

from suite.mutants import EQUIVALENT, FIRST, ROOT, SURVIVES, parse_failed_test, read_faults, read_outcomes

from ejkernel.ops.plugins import registry

FAULTS = read_faults()
SUITE = ROOT / "packages/ejkernel-core/src/ejkernel_conformance"


def test_faults_are_distinct_and_cover_every_package_and_kind():
    assert len(FAULTS) >= 120
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    packages = Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert packages.keys() >= {"ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda"}
    kinds = {"mask", "rescale", "stride", "gradient", "heads", "pages", "barrier", "tier", "lock", "dtype"}
    assert {fault.kind for fault in FAULTS} >= kinds


def test_every_fault_changes_one_line_of_its_file():
    """A source that has changed makes faults stale: mend their text in tests/mutants/faults.toml."""
    assert [fault.name for fault in FAULTS if fault.is_stale(ROOT)] == []
    for fault in FAULTS:
        if fault.file.endswith(".py"):
            text = (ROOT / fault.file).read_text(encoding="utf-8")
            compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_a_fault_is_stale_whose_text_is_not_in_its_file_exactly_once(tmp_path):
    fault = dataclasses.replace(FAULTS[0], file="source.py", old="x + 1")
    for text, stale in (("y = x + 1", False), ("y = 1 + x", True), ("y = x + 1; z = x + 1", True)):
        (tmp_path / "source.py").write_text(text)
        assert fault.is_stale(tmp_path) == stale


def test_tests_and_operations_of_faults_exist():
    for fault in FAULTS:
        assert fault.tests or fault.ops
        assert all(Path(ROOT, test).is_file() for test in fault.tests), fault
        assert set(fault.ops) <= registry().ops.keys()


def test_each_fault_has_a_result_and_the_first_command_catches_95_of_100():
    outcomes = read_outcomes()
    assert outcomes.keys() == {fault.name for fault in FAULTS}
    for fault in FAULTS:
        assert bool(fault.equivalent) == (outcomes[fault.name].command == EQUIVALENT)
    caught = Counter(outcome.command for outcome in outcomes.values() if outcome.command != EQUIVALENT)
    assert not caught[SURVIVES]
    assert caught[FIRST] >= 0.95 * caught.total()


def test_the_tests_that_catch_faults_are_where_the_results_say():
    named = [outcome.test for outcome in read_outcomes().values() if outcome.command != EQUIVALENT]
    assert [name for name in named if not _is_there(*name.split("::", 1))] == []


def _is_there(file: str, test: str) -> bool:
    """Whether a file of tests has a function; the conformance suite's are collected by files that import them."""
    path, function = ROOT / file, test.partition("[")[0]
    sources = SUITE.glob("test_*.py") if path.is_relative_to(ROOT / "tests" / "conformance") else [path]
    return path.is_file() and any(f"def {function}(" in one.read_text(encoding="utf-8") for one in sources)


def test_failed_tests_are_read_from_lines_of_the_summary():
    read = parse_failed_test
    assert read("FAILED tests/a.py::test_b[packed-W - 1] - ValueError: x[0] - 1") == "tests/a.py::test_b[packed-W - 1]"
    assert read("FAILED tests/a.py::test_b[packed-W - 1]") == "tests/a.py::test_b[packed-W - 1]"
    assert read("FAILED tests/a.py::test_b - assert x[0]") == "tests/a.py::test_b"
    assert read("ERROR tests/a.py") == "tests/a.py"
