"""The generator of covering sets."""

import itertools

from pairwise import covered, pairwise


def test_pairwise_set_covers_every_allowed_pair_and_no_other():
    factors = {"a": [0, 1, 2], "b": ["x", "y"], "c": [None, True], "d": [1, 2, 3, 4]}

    def allowed(part):
        return not (part.get("a") == 2 and part.get("b") == "y")

    found = pairwise(factors, allowed)
    seen = {pair for combination in found for pair in covered(combination)}
    every = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }
    assert seen == every - {frozenset({("a", 2), ("b", "y")})}
    assert all(list(combination) == list(factors) for combination in found)


def test_pairwise_combinations_are_few_and_deterministic():
    factors = {name: [0, 1] for name in "abcdefghijklmnop"}
    found = pairwise(factors)
    assert found == pairwise(factors)
    assert len(found) <= 16  # of 65536
