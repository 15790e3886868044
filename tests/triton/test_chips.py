"""The chips of Triton's heuristics are those of the one table."""

import pytest

from ejkernel.ops.chips import GPUS
from ejkernel_triton.chips import CHIPS

SHARED = ("vendor", "architecture", "shared_memory", "registers", "multiprocessors", "capability")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.target)
def test_a_chip_has_the_figures_of_the_table(chip):
    assert {name: getattr(chip, name) for name in SHARED} == {name: getattr(GPUS[chip.target], name) for name in SHARED}


def test_both_have_the_same_chips():
    assert list(CHIPS) == list(GPUS)
