"""Which references a benchmark compares with: those that are known to fit in memory."""

import pytest

from ejkernel.cli.check import REFERENCE_LIMIT_BYTES, check_reference_fits


@pytest.mark.parametrize(
    ("needed", "passed", "text"),
    [
        (0, True, "is the reference"),
        (REFERENCE_LIMIT_BYTES, True, "is the reference"),
        (REFERENCE_LIMIT_BYTES + 1, None, "skipped: the reference needs 2.0 GiB of memory"),
        (None, None, "skipped: the reference needs an unknown amount of memory"),
    ],
)
def test_a_reference_of_unknown_size_is_skipped_like_a_large_one(needed, passed, text):
    outcome = check_reference_fits(needed)
    assert (outcome.passed, outcome.text) == (passed, text)
