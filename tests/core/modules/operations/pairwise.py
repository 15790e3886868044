"""A small greedy generator of covering sets: every pair of values of two factors occurs in at least one combination."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
_Pair = frozenset[tuple[str, Hashable]]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool] = lambda part: True
) -> list[Combination]:
    """Combinations that cover all allowed pairs of values; the same for the same factors.

    Args:
        factors: Factor -> its values, the plainest first.
        allowed: Judges combinations, and parts of them, in which some factors are missing.
    """
    order = {name: {value: n for n, value in enumerate(values)} for name, values in factors.items()}
    missing = {pair: None for pair in _pairs(factors) if allowed(dict(pair))}
    found = []
    while missing:
        combination = dict(next(iter(missing)))
        for name, values in sorted(factors.items(), key=lambda item: -len(item[1])):
            if name not in combination:
                combination[name] = max(
                    (value for value in values if allowed({**combination, name: value})),
                    # Ties go to the earlier value, so that combinations stay as plain as coverage lets them be.
                    key=lambda value: (_gain({**combination, name: value}, name, missing), -order[name][value]),
                )
        for pair in covered(combination):
            missing.pop(pair, None)
        found.append({name: combination[name] for name in factors})
    return found


def covered(combination: Combination) -> Iterator[_Pair]:
    """The pairs of a combination."""
    return (frozenset(pair) for pair in itertools.combinations(combination.items(), 2))


def _pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[_Pair]:
    for (one, values), (other, others) in itertools.combinations(factors.items(), 2):
        yield from (frozenset({(one, a), (other, b)}) for a in values for b in others)


def _gain(combination: Combination, name: str, missing: Mapping[_Pair, None]) -> int:
    new = (name, combination[name])
    return sum(frozenset({new, item}) in missing for item in combination.items() if item != new)
