"""Which chips a case is compiled for ahead of time: a covering design, or all of them."""

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
EVERY_CHIP_VARIABLE = "EJKERNEL_EVERY_CHIP"
"""The variable that asks for every case on every chip: `nox -s ahead` and `nox -s triton_lowering` set it."""


def pair_cases_with_chips(
    cases: Iterable[Case], chips: Iterable[str], chips_for_every_case: Iterable[str] = ()
) -> list[tuple[Case, str]]:
    """Returns pairs of a case and a chip in which every case and every chip appears.

    What a compiler says depends on the kernel and on the chip, and seldom on the pair of them: each kernel is compiled
    for each chip with some case. `EJKERNEL_EVERY_CHIP=1` asks for all pairs. `nox -s thorough` runs some of them.

    Args:
        cases: The cases of a kernel.
        chips: The chips, which the cases get in turn.
        chips_for_every_case: Chips that every case is compiled for, in addition.
    """
    cases, chips, chips_for_every_case = list(cases), list(chips), list(chips_for_every_case)
    if os.environ.get(EVERY_CHIP_VARIABLE) == "1":
        return list(itertools.product(cases, chips))
    others = [chip for chip in chips if chip not in chips_for_every_case]
    count = max(len(cases), len(others)) if cases and others else 0
    turns = [(cases[n % len(cases)], others[n % len(others)]) for n in range(count)]
    return [*itertools.product(cases, chips_for_every_case), *turns]
