"""Which chips a case is compiled for ahead of time: a covering design, or all of them."""

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
EVERY = "EJKERNEL_EVERY_CHIP"
"""The variable that asks for every case on every chip: `nox -s ahead` and `nox -s triton_lowering` set it."""


def spread(cases: Iterable[Case], chips: Iterable[str], always: Iterable[str] = ()) -> list[tuple[Case, str]]:
    """Returns pairs of a case and a chip in which every case and every chip appears.

    What a compiler says depends on the kernel and on the chip, and seldom on the pair of them: each kernel is compiled
    for each chip with some case. `EJKERNEL_EVERY_CHIP=1` asks for all pairs.

    Args:
        cases: The cases of a kernel.
        chips: The chips, which the cases get in turn.
        always: Chips that every case is compiled for, in addition.
    """
    cases, chips, always = list(cases), list(chips), list(always)
    if os.environ.get(EVERY) == "1":
        return list(itertools.product(cases, chips))
    others = [chip for chip in chips if chip not in always]
    count = max(len(cases), len(others)) if cases and others else 0
    turns = [(cases[n % len(cases)], others[n % len(others)]) for n in range(count)]
    return [*itertools.product(cases, always), *turns]
