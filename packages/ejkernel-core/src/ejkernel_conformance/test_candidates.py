"""Configurations change the speed of a call, not its answer."""

from ejkernel_conformance import checks
from ejkernel_conformance.selection import Tunable
from ejkernel_conformance.skips import skip_if_refused


def test_candidates(ejk_candidates: Tunable) -> None:
    """Every candidate of a direction, on the case that has most of them."""
    directions = ("forward",) if ejk_candidates.direction == "forward" else ("forward", "backward")
    skip_if_refused(ejk_candidates.subject, *directions)
    for part in ejk_candidates.parts:
        checks.check_candidate(ejk_candidates.subject, ejk_candidates.direction, part)
