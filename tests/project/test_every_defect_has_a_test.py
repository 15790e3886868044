"""The numerical defects of the library this one replaces, T-9 to T-33 of its review, each have a test named after them.

`test_t19_...` protects from T-19. T-1 to T-8 are of the engine, whose test files are named after what they protect.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_defect_has_a_test():
    sources = (path.read_text() for path in TESTS.rglob("test_*.py"))
    found = {int(number) for source in sources for number in re.findall(r"^def test_t(\d+)_", source, re.MULTILINE)}
    assert not set(range(9, 34)) - found
