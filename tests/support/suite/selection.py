"""Which tests `nox -s tests` runs, and which `nox -s thorough`: computed from the tests and from what each costs.

The conformance suite has covering designs of its own (`ejkernel_conformance.design`), which the same option selects:
`--ejk-cover=first`, `--ejk-cover=second`. Of the other tests the first command runs, in this order:

1. every test of a function whose tests cost at most `CHEAP_SECONDS` each. A new test has no known cost: it is here;
2. tests marked `design`, which run that covering design in a process of its own, where kernels are interpreted;
3. each test that tests/mutants/results.md names as the one of this command that caught a fault;
4. of each module without such a test, one of the cheapest function;
5. of the others, what adds most per second, until the tests cost `BUDGET_SECONDS` of a processor: first each
   function, then each value of each of its parameters, then each pair of values.

The second command runs each function that the first leaves out. Where all tests of a function cost t seconds and t is
more than `SECONDS_IN_FULL`, both commands together run tests of `sqrt(SECONDS_IN_FULL * t)` seconds, and at least one:
first each value of each parameter, then each pair of values, then what lies evenly between them. So what is expensive
is thinned most, and a new test changes nothing for other functions. Tests marked `whole`, those that alone caught a
fault, and those without a known cost are not thinned. Where a parameter is an operation, each operation has a test, so
that a new one is not left out. `nox -s everything` runs all tests.

`costs.json` holds the mean seconds of the functions that cost more than `CHEAP_SECONDS`; `pytest --record-costs` writes
it.
"""

import functools
import json
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from ejkernel.ops.model import Op
from ejkernel_conformance.covering import Candidate, cover, pairs
from suite import needs
from suite.mutants import FIRST, THOROUGH, read_outcomes

COSTS_FILE = Path(__file__).with_name("costs.json")
CHEAP_SECONDS = 0.12
BUDGET_SECONDS = 240.0
SECONDS_IN_FULL = 1.0
SECONDS_IN_FULL_ELSEWHERE = 4.0
"""The same, of tests that need what the first command does not install: nothing of them ran there."""
GOLDEN_RATIO = 0.6180339887
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
    chosen = {index for index, item in enumerate(items) if function_id_of(item) not in costs or _is_design(item)}
    chosen |= _indices_that_caught_faults(items, FIRST)
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


def _indices_that_caught_faults(items: Sequence[pytest.Item], command: str) -> set[int]:
    """The indices of the tests that the list of faults names.

    Where the parameters of a named test have other values since, or it has got some, all tests of its function count.
    """
    proven = tests_that_caught_faults(command)
    renamed = {test.partition("[")[0] for test in proven - {item.nodeid for item in items}}
    return {n for n, item in enumerate(items) if item.nodeid in proven or function_id_of(item) in renamed}


@functools.cache
def tests_that_caught_faults(command: str) -> frozenset[str]:
    """The ids of the tests of a command that the list of faults names."""
    return frozenset(outcome.test for outcome in read_outcomes().values() if outcome.command == command)


def _is_design(item: pytest.Item) -> bool:
    return item.get_closest_marker("design") is not None


def _function_features(item: pytest.Item) -> Iterator[Hashable]:
    yield function_id_of(item)


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    # Not `callspec.indices`: pytest 9 counts there the tests of a function, and not the values of a parameter.
    return getattr(getattr(item, "callspec", None), "params", {})


def _value_features(item: pytest.Item) -> Iterator[Hashable]:
    yield from ((function_id_of(item), name, _identity(value)) for name, value in _parameters(item).items())


def _identity(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _pair_features(item: pytest.Item) -> Iterator[Hashable]:
    yield from pairs(_value_features(item))


COVERAGE_LEVELS = (_function_features, _value_features, _pair_features)
"""What tests add, the most important first: functions, values of their parameters, pairs of values."""


def choose_tests_of_second_command(
    items: Sequence[pytest.Item], first: Set[int], costs: Mapping[str, float]
) -> set[int]:
    """The indices of the tests of the second command, where those of the first are `first`."""
    kept, by_function = {*first, *_indices_that_caught_faults(items, THOROUGH)}, defaultdict[str, list[int]](list)
    for index, item in enumerate(items):
        by_function[function_id_of(item)].append(index)
        if item.get_closest_marker("whole") is not None:
            kept.add(index)
    for function, indices in by_function.items():
        kept |= _tests_of_other_operations(items, indices, kept)
        done = [index for index in indices if index in kept]
        left = [index for index in indices if index not in kept]
        elsewhere = needs.is_left_to_other_commands(items[indices[0]])
        in_full = SECONDS_IN_FULL_ELSEWHERE if elsewhere else SECONDS_IN_FULL
        num_tests = _num_tests_of_both_commands(len(indices), costs.get(function, 0.0), in_full) - len(done)
        kept.update(left[n] for n in _spread([items[n] for n in left], [items[n] for n in done])[: max(0, num_tests)])
    return kept - first


def _tests_of_other_operations(items: Sequence[pytest.Item], indices: Sequence[int], kept: Set[int]) -> set[int]:
    """The indices of tests of a function on the operations that those of its tests do not have which are kept."""
    covered = {name for index in indices if index in kept for name in _operations(items[index])}
    rest = [index for index in indices if index not in kept]
    return {rest[n] for n in cover([Candidate(frozenset(_operations(items[index]))) for index in rest], covered)}


def _operations(item: pytest.Item) -> Iterator[Hashable]:
    yield from (value.name for value in _parameters(item).values() if isinstance(value, Op))


def _num_tests_of_both_commands(num_tests: int, seconds_each: float, seconds_in_full: float) -> int:
    """How many tests of a function both commands run together."""
    if num_tests * seconds_each <= seconds_in_full:
        return num_tests
    return max(1, int(math.sqrt(seconds_in_full * num_tests / seconds_each)))


def _spread(items: Sequence[pytest.Item], done: Sequence[pytest.Item]) -> list[int]:
    """The indices of the tests of a function, in an order of which every beginning lies evenly in what they cover.

    The beginning differs between functions: what they have in common, such as chips, appears in some of them.
    """
    if not items:
        return []
    start = zlib.crc32(function_id_of(items[0]).encode()) / 2**32
    even = sorted(range(len(items)), key=lambda index: (start + index * GOLDEN_RATIO) % 1)
    order: list[int] = []
    for level in (_value_features, _pair_features):
        covered = {feature for item in [*done, *(items[n] for n in order)] for feature in level(item)}
        rest = [index for index in even if index not in set(order)]
        order += [rest[n] for n in cover([Candidate(frozenset(level(items[n]))) for n in rest], covered)]
    return [*order, *(index for index in even if index not in set(order))]


def remove_tests_of_other_commands(items: list[pytest.Item], command: str) -> list[pytest.Item]:
    """Removes the tests that are not those of a command, `first`, `second` or `stronger`, which is both; returns them.

    With `rest` the tests of the first command are removed.
    """
    costs = known_costs()
    candidates = [item for item in items if not needs.is_left_to_other_commands(item)]
    first = {candidates[index] for index in choose_tests_of_first_command(candidates, costs)}
    if command == "rest":
        kept = set(items) - first
    elif command == "first":
        kept = first
    else:
        indices = {index for index, item in enumerate(items) if item in first}
        kept = {items[index] for index in choose_tests_of_second_command(items, indices, costs)}
        kept = kept | first if command == "stronger" else kept
    left = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
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
