"""Which tests `nox -s tests` runs, and which `nox -s thorough`: computed from the tests and from what each costs.

The conformance suite has a covering design of its own (`ejkernel_conformance.design`), which the same option selects:
`--ejk-cover=first`, `--ejk-cover=rest`. Of the other tests the first command runs, in this order:

1. every test of a function whose tests cost at most `CHEAP_SECONDS` each. A new test has no known cost: it is here;
2. tests marked `design`, which run that covering design in a process of its own, where kernels are interpreted;
3. each test that tests/mutants/results.md names as the one of this command that caught a fault;
4. of each module without such a test, one of the cheapest function;
5. of the others, what adds most per second, until the tests cost `BUDGET_SECONDS` of a processor: first each
   function, then each value of each of its parameters, then each pair of values.

`costs.json` holds the mean seconds of the functions that cost more than `CHEAP_SECONDS`; `pytest --record-costs` writes
it.
"""

import json
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ejkernel_conformance.covering import Candidate, cover, pairs
from suite import needs
from suite.mutants import FIRST, read_outcomes

COSTS_FILE = Path(__file__).with_name("costs.json")
CHEAP_SECONDS = 0.12
BUDGET_SECONDS = 240.0
LONG_TEST_SECONDS = 5.0


def function_id_of(item: pytest.Item) -> str:
    """The function of a test: its id without parameters."""
    return item.nodeid.partition("[")[0]


def known_costs() -> dict[str, float]:
    """The seconds of a processor that a test of a function takes, of those that take more than `CHEAP_SECONDS`."""
    return json.loads(COSTS_FILE.read_text(encoding="utf-8")) if COSTS_FILE.exists() else {}


def choose_tests_of_first_command(
    items: Sequence[pytest.Item], costs: Mapping[str, float], budget: float = BUDGET_SECONDS
) -> set[int]:
    """The indices of the tests of the first command."""
    proven = {outcome.test for outcome in read_outcomes().values() if outcome.command == FIRST}
    chosen = {
        index
        for index, item in enumerate(items)
        if function_id_of(item) not in costs or _is_design(item) or item.nodeid in proven
    }
    spent = sum(costs.get(function_id_of(items[index]), CHEAP_SECONDS / 4) for index in chosen)
    by_module = defaultdict[Path, list[int]](list)
    for index, item in enumerate(items):
        by_module[item.path].append(index)
    for indices in by_module.values():
        if chosen.isdisjoint(indices):
            cheapest = min(indices, key=lambda index: (costs[function_id_of(items[index])], index))
            chosen.add(cheapest)
            spent += costs[function_id_of(items[cheapest])]
    for level in COVERAGE_LEVELS:
        covered = {feature for index in chosen for feature in level(items[index])}
        rest = [index for index in range(len(items)) if index not in chosen]
        candidates = [Candidate(frozenset(level(items[index])), costs[function_id_of(items[index])]) for index in rest]
        added = [rest[index] for index in cover(candidates, covered, budget - spent)]
        chosen.update(added)
        spent += sum(costs[function_id_of(items[index])] for index in added)
    return chosen


def _is_design(item: pytest.Item) -> bool:
    return item.get_closest_marker("design") is not None


def _function_features(item: pytest.Item) -> Iterator[Hashable]:
    yield function_id_of(item)


def _value_features(item: pytest.Item) -> Iterator[Hashable]:
    indices: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "indices", {})
    yield from ((function_id_of(item), name, index) for name, index in indices.items())


def _pair_features(item: pytest.Item) -> Iterator[Hashable]:
    yield from pairs(_value_features(item))


COVERAGE_LEVELS = (_function_features, _value_features, _pair_features)
"""What tests add, the most important first: functions, values of their parameters, pairs of values."""


def remove_tests_of_other_command(items: list[pytest.Item], command: str) -> list[pytest.Item]:
    """Removes the tests of the other command, and returns them."""
    candidates = [item for item in items if not needs.is_left_to_other_commands(item)]
    chosen = {candidates[index] for index in choose_tests_of_first_command(candidates, known_costs())}
    left = [item for item in items if (item in chosen) != (command == "first")]
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    return left


def shuffle_in_groups(items: list[pytest.Item], seed: int) -> None:
    """Puts files in a random order, the groups of tests in each, and the tests in each group.

    Tests of a group have the same parameters, and most of them share compiled programs, which a process keeps for a few
    groups at a time. Tests of more than `LONG_TEST_SECONDS` come first, in a random order, too. The order is the same
    in every process, whatever its seed of hashes.
    """
    generator, costs = random.Random(seed), known_costs()
    generator.shuffle(items)
    places: list[dict[str, int]] = []
    for names in ({str(item.path) for item in items}, {group_id_of(item) for item in items}):
        ordered = sorted(names)
        generator.shuffle(ordered)
        places.append({name: index for index, name in enumerate(ordered)})
    files, groups = places

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        return (
            costs.get(function_id_of(item), 0.0) <= LONG_TEST_SECONDS,
            files[str(item.path)],
            groups[group_id_of(item)],
        )

    items.sort(key=place)


def group_id_of(item: pytest.Item) -> str:
    """The parameters of a test; of a test without parameters its id."""
    return item.nodeid.partition("[")[2] or item.nodeid


def move_long_tests_first(items: list[pytest.Item]) -> None:
    """Puts tests of more than `LONG_TEST_SECONDS` first: none of them is left for one process when the others have
    ended.
    """
    costs = known_costs()
    items.sort(key=lambda item: -max(LONG_TEST_SECONDS, costs.get(function_id_of(item), 0.0)))


def plan_lines(items: Sequence[pytest.Item], num_left_out: int) -> Iterator[str]:
    """The tests of a command by module, with what they are expected to cost."""
    costs, modules = known_costs(), defaultdict[str, list[float]](list)
    for item in items:
        modules[item.nodeid.partition("::")[0]].append(costs.get(function_id_of(item), CHEAP_SECONDS / 4))
    for module, seconds in sorted(modules.items()):
        yield f"{module}: {len(seconds)} tests, about {sum(seconds):.1f} s"
    total = sum(map(sum, modules.values()))
    selected = f"{len(items):,} tests in {len(modules)} modules, about {total:.0f} s of a processor"
    yield f"{selected}; {num_left_out:,} left out"
