"""A covering design: few tests in which everything that matters appears.

A test has features: what it would show. `cover` chooses tests until every feature of any test is a feature of a chosen
one, by the greedy rule: next comes the test that adds most per unit of cost. The chosen set is at most a logarithmic
factor larger than the smallest one, and depends on nothing but the features, costs and order of the tests.
"""

import dataclasses
import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A test that may be chosen.

    Attributes:
        features: What it would show.
        cost: What it costs, in any unit; above 0.
    """

    features: frozenset[Hashable]
    cost: float = 1.0


def cover(candidates: Sequence[Candidate], covered: Iterable[Hashable] = (), budget: float = float("inf")) -> list[int]:
    """Returns the indices of the chosen candidates, in order of choice.

    Args:
        candidates: The tests.
        covered: Features that need no test.
        budget: The largest sum of costs: a candidate that would exceed it is left out.
    """
    seen, spent, chosen = set(covered), 0.0, list[int]()
    heap = [(-len(c.features) / c.cost, index) for index, c in enumerate(candidates)]
    heapq.heapify(heap)
    while heap:
        rank, index = heapq.heappop(heap)
        gain = len(candidates[index].features - seen)
        if not gain or spent + candidates[index].cost > budget:
            continue
        current = -gain / candidates[index].cost
        if current > rank:  # features of it have been covered since: it goes back in line
            heapq.heappush(heap, (current, index))
            continue
        chosen.append(index)
        seen |= candidates[index].features
        spent += candidates[index].cost
    return chosen


def pairs(values: Iterable[Hashable]) -> Iterator[tuple[Hashable, Hashable]]:
    """Yields every unordered pair of different values, in a fixed order."""
    ordered: list[Any] = sorted(values, key=repr)
    for index, first in enumerate(ordered):
        for second in ordered[index + 1 :]:
            yield first, second
