"""The list of faults that `nox -s mutants` plants is true to the sources."""

from collections import Counter
from pathlib import Path

from suite.mutants import EQUIVALENT, FIRST, ROOT, SURVIVES, read_faults, read_outcomes

from ejkernel.ops.plugins import registry

FAULTS = read_faults()
SUITE = ROOT / "packages/ejkernel-core/src/ejkernel_conformance"


def test_there_are_enough_of_each_part():
    assert len(FAULTS) >= 120
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    packages = Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert packages.keys() >= {"ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda"}
    kinds = {"mask", "rescale", "stride", "gradient", "heads", "pages", "barrier", "tier", "lock", "dtype"}
    assert {fault.kind for fault in FAULTS} >= kinds


def test_nearly_all_faults_change_one_place_of_their_file():
    """Lines of the list change with the sources; a few may be out of date before somebody mends the list."""
    texts = {fault.file: (ROOT / fault.file).read_text(encoding="utf-8") for fault in FAULTS}
    stale = [fault for fault in FAULTS if texts[fault.file].count(fault.old) != 1]
    assert len(FAULTS) - len(stale) >= max(120, 0.9 * len(FAULTS)), stale
    for fault in FAULTS:
        changed = texts[fault.file].replace(fault.old, fault.new)
        assert fault in stale or changed != texts[fault.file]
        if fault.file.endswith(".py"):
            compile(changed, fault.file, "exec")


def test_their_tests_and_operations_exist():
    for fault in FAULTS:
        assert fault.tests or fault.ops
        assert all(Path(ROOT, test).is_file() for test in fault.tests), fault
        assert set(fault.ops) <= registry().ops.keys()


def test_results_are_of_these_faults_and_the_first_command_catches_95_of_100():
    outcomes = read_outcomes()
    assert outcomes.keys() <= {fault.name for fault in FAULTS}
    for fault in FAULTS:
        assert bool(fault.equivalent) == (fault.name in outcomes and outcomes[fault.name].command == EQUIVALENT)
    caught = Counter(outcome.command for outcome in outcomes.values() if outcome.command != EQUIVALENT)
    assert not caught[SURVIVES]
    assert caught[FIRST] >= 0.95 * caught.total()


def test_nearly_all_tests_that_catch_faults_are_where_the_results_say():
    named = [outcome.test for outcome in read_outcomes().values() if outcome.command != EQUIVALENT]
    missing = [name for name in named if not _is_there(*name.split("::", 1))]
    assert len(missing) <= 0.1 * len(named), missing


def _is_there(file: str, test: str) -> bool:
    """Whether a file of tests has a function; the conformance suite's are collected by files that import them."""
    path, function = ROOT / file, test.partition("[")[0]
    sources = SUITE.glob("test_*.py") if path.is_relative_to(ROOT / "tests" / "conformance") else [path]
    return path.is_file() and any(f"def {function}(" in one.read_text(encoding="utf-8") for one in sources)
