"""The only reason for which a test of the suite is skipped."""

from typing import Any

import pytest

from ejkernel.ops.config.params import Direction
from ejkernel_conformance.subjects import Subject, refusal


def skip_if_refused(subject: Subject, *directions: Direction, **about: Any) -> None:
    """Skips the running test where dispatch refuses the subject; the reason is dispatch's.

    Args:
        subject: Implementation and case.
        *directions: The passes that the test runs.
        **about: As for `subjects.refusal`.
    """
    for direction in directions:
        if reason := refusal(subject, direction, **about):
            pytest.skip(reason)
