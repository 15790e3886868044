"""What an implementation says about itself. Needs neither its device nor, but for gradients, its toolchain."""

from ejkernel_conformance import claims
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject, abstract_record


def test_serves_some_case(ejk_implementation: FamilyTarget) -> None:
    """An implementation that refuses every case was not tested."""
    claims.check_serves_some_case(ejk_implementation.implementation, ejk_implementation.cases)


def test_handles(ejk_claim: FamilyTarget) -> None:
    """An argument in `handles` makes a difference in some case."""
    claims.check_claim(ejk_claim.implementation, ejk_claim.name, ejk_claim.cases)


def test_gives_gradient(ejk_gradient: FamilyTarget) -> None:
    """A gradient in `gradients` is produced."""
    implementation, name = ejk_gradient.implementation, ejk_gradient.name
    op, case = claims.gradient_case(implementation, name, ejk_gradient.cases)
    subject = Subject(op=op, implementation=implementation, case=case)
    wanted = claims.claimed_gradients(implementation, abstract_record(op, case))
    skip_if_refused(subject, "backward", wanted=wanted)
    claims.check_gradient_claim(op, implementation, name, case)
