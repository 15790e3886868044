"""The order of tests in `tests/support/suite/selection.py`, and the costs that it reads."""

import ast
import json
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from suite import selection
from suite.mutants import FIRST, read_outcomes

from ejkernel.ops.plugins import registry

CONFTEST = str(Path(__file__).parents[1] / "conftest.py")
COSTS = {"a.py::test_short": 1.0, "a.py::test_long": 30.0, "a.py::test_longer": 60.0}


@pytest.mark.parametrize("cover", ["first", "all"])
def test_processes_of_a_run_in_parallel_begin_with_long_tests(cover, request, monkeypatch):
    """A schedule of a TPU kernel came last, and one of two processes had nothing to do for a minute."""
    monkeypatch.setattr(selection, "known_costs", lambda: COSTS)
    conftest = request.config.pluginmanager.get_plugin(CONFTEST)
    monkeypatch.setattr(conftest, "_select", lambda *_: None)
    monkeypatch.setattr(conftest.needs, "remove_tests_with_unmet_needs", lambda *_: [])
    options = {"--only": None, "--ejk-cover": cover, "--needs": None, "--shuffle": None}
    config = SimpleNamespace(getoption=options.get, stash={}, workerinput={})
    items = [SimpleNamespace(nodeid=f"a.py::test_{name}[1]") for name in ("short", "new", "long", "longer")]
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid[11:-3] for item in items] == ["longer", "long", "short", "new"]


def shuffled(seed):
    """The ids of some tests in the order of a seed."""
    names = [f"{file}::test_{name}[{case}]" for file in "ab" for name in ("one", "two", "three") for case in "xyz"]
    items = [SimpleNamespace(nodeid=name, path=Path(name[0])) for name in [*names, "a.py::test_long", "b::test_plain"]]
    selection.shuffle_in_groups(items, seed)
    return [item.nodeid for item in items]


def test_shuffling_changes_every_order_and_keeps_tests_together_that_share_programs(monkeypatch):
    """Tests of one case were apart, and their programs were compiled again: 640 s instead of 516 s."""
    monkeypatch.setattr(selection, "known_costs", lambda: COSTS)
    orders = {seed: shuffled(seed) for seed in range(8)}
    for order in orders.values():
        assert order[0] == "a.py::test_long"
        groups = [(name[0], selection.group_id_of(SimpleNamespace(nodeid=name))) for name in order[1:]]
        assert [key for key, _ in groupby(groups)] == list(dict.fromkeys(groups))
        assert len({file for file, _ in groupby(file for file, _ in groups)}) == 2
    assert orders[3] == shuffled(3)
    for position in (1, -1):
        assert len({order[position][0] for order in orders.values()}) == 2
        assert len({order[position].partition("::")[2] for order in orders.values()}) > 3


def _names_defined_or_imported(node: ast.AST) -> list[str]:
    """The conformance suite's tests are imported into the file that runs them here."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    return [node.name] if isinstance(node, ast.FunctionDef) else []


def test_costs_are_those_of_tests_that_exist_each_once():
    """The test of a stale name has no known cost, and runs in the first command however long it takes."""
    text = selection.COSTS_FILE.read_text(encoding="utf-8")
    names = [name for name, _ in json.loads(text, object_pairs_hook=list)]
    assert not [name for name, count in Counter(names).items() if count > 1]
    # The test that caught a fault is no part of a command any more if it has another name now.
    names += [outcome.test.partition("[")[0] for outcome in read_outcomes().values() if "::" in outcome.test]
    root = Path(__file__).parents[2]
    defined = {
        f"{file}::{name}"
        for file in {name.partition("::")[0] for name in names}
        if (root / file).exists()
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8")))
        for name in _names_defined_or_imported(node)
    }
    assert sorted(set(names) - defined) == []


def fake_tests(function, parameters, *marks, need=None):
    """Tests of a function, one for each dictionary of values of parameters."""
    return [
        SimpleNamespace(
            nodeid=f"{function}[{number}]",
            path=Path(function.partition("::")[0]),
            callspec=SimpleNamespace(params=values),
            get_closest_marker=lambda name: name in marks or None,
            iter_markers=lambda name: [SimpleNamespace(args=(need,))] if need else [],
        )
        for number, values in enumerate(parameters)
    ]


def chosen_of_second(items, costs, first=()):
    return selection.choose_tests_of_second_command(items, frozenset(first), costs)


def test_the_second_command_thins_what_is_expensive_and_runs_all_else():
    """Whatever was left by the first command ran there, and `.ci/run` took 53 minutes."""
    values = [{"case": n} for n in range(50)]
    assert selection.SECONDS_IN_FULL == 1.0
    for items, costs, num_tests in (
        (fake_tests("a.py::test_unknown", values), {}, 50),
        (fake_tests("a.py::test_cheap", values), {"a.py::test_cheap": 0.02}, 50),
        (fake_tests("a.py::test_dear", values), {"a.py::test_dear": 0.5}, 10),
        (fake_tests("a.py::test_dearest", values), {"a.py::test_dearest": 400.0}, 1),
        (fake_tests("a.py::test_compiles", values, need="libtpu"), {"a.py::test_compiles": 0.5}, 20),
        (fake_tests("a.py::test_suite", values, "whole"), {"a.py::test_suite": 400.0}, 50),
    ):
        chosen = chosen_of_second(items, costs)
        assert len(chosen) == num_tests
        # Those of the first command count, and do not run again.
        first = sorted(chosen)[:4]
        again = chosen_of_second(items, costs, first)
        assert again.isdisjoint(first)
        assert len(again) == max(0, num_tests - len(first))


def test_the_second_command_prefers_values_then_pairs_and_spreads_over_cases():
    chips = ("v5e", "v5p", "v6e", "v7x")
    every = [{"case": [case], "chip": chip} for case in range(4) for chip in chips]
    cases = [[0], [1], [2], [3]]
    for values in every:  # one list is one value, as pytest hands it to all tests of a product
        values["case"] = cases[values["case"][0]]
    items = fake_tests("a.py::test_compiles", every)
    chosen = [every[n] for n in chosen_of_second(items, {"a.py::test_compiles": 1.0})]
    assert len(chosen) == 4
    assert {values["chip"] for values in chosen} == set(chips)
    assert sorted(values["case"] for values in chosen) == cases
    many = fake_tests("a.py::test_many", [{"case": n} for n in range(100)])
    numbers = sorted(chosen_of_second(many, {"a.py::test_many": 1.0}))
    assert len(numbers) == 10
    assert max(b - a for a, b in pairwise([0, *numbers, 99])) <= 20


def test_every_fault_is_caught_by_a_test_of_one_of_the_two_commands(monkeypatch):
    """A test that caught a fault is selected before all others of its function."""
    items = fake_tests("a.py::test_dear", [{"case": n} for n in range(9)])
    cost = {"a.py::test_dear": 400.0}
    tests = {selection.THOROUGH: {"a.py::test_dear[7]"}}
    assert chosen_of_second(items, cost) != {7}
    monkeypatch.setattr(selection, "tests_that_caught_faults", tests.get)
    assert chosen_of_second(items, cost) == {7}
    # It had no parameters when it caught the fault, or others.
    for name in ("a.py::test_dear", "a.py::test_dear[old]"):
        tests[selection.THOROUGH] = {name}
        assert chosen_of_second(items, cost) == set(range(9))


def test_tests_of_the_suite_that_caught_faults_are_marked(request, monkeypatch):
    monkeypatch.setattr(selection, "tests_that_caught_faults", {FIRST: {"a.py::test_value[1]"}}.get)
    conftest, marks = request.config.pluginmanager.get_plugin(CONFTEST), {}
    for name in ("a.py::test_value[1]", "a.py::test_value[2]"):
        marks[name] = []
        conftest.pytest_itemcollected(SimpleNamespace(nodeid=name, add_marker=marks[name].append))
    assert marks == {"a.py::test_value[1]": ["ejk_first"], "a.py::test_value[2]": []}


def test_each_operation_that_is_a_parameter_has_a_test():
    """A test of all operations ran with a third of them, and a new one could be left out of both commands."""
    ops = list(registry().ops.values())[:9]
    items = fake_tests("a.py::test_dear", [{"op": op, "letter": letter} for op in ops for letter in "ab"])
    chosen = chosen_of_second(items, {"a.py::test_dear": 400.0}, [3])
    assert 3 not in chosen
    assert sorted(index // 2 for index in {3, *chosen}) == list(range(9))
