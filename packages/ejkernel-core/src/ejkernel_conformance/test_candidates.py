"""Configurations change the speed of a call, not its answer."""

from ejkernel_conformance import checks
from ejkernel_conformance.selection import Tunable
from ejkernel_conformance.served import candidates_refused, unless


@unless(candidates_refused)
def test_candidates(ejk_candidates: Tunable) -> None:
    """Every candidate of a direction gives the reference's result, on the case that has most candidates."""
    for part in ejk_candidates.parts:
        checks.check_candidate(ejk_candidates.subject, ejk_candidates.direction, part)
