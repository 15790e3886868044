"""Tests what an implementation declares. The tests need no device, and no toolchain except for gradients."""

from ejkernel_conformance import claims, refusals
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.served import claimed_gradient_refused, unless
from ejkernel_conformance.subjects import abstract_record


def test_serves_some_case(ejk_implementation: FamilyTarget) -> None:
    """An implementation that refuses every case was not tested."""
    claims.check_serves_some_case(ejk_implementation.implementation, ejk_implementation.cases)


def test_refusals(ejk_implementation: FamilyTarget) -> None:
    """Each case is served or refused with a reason, on this device and on the devices that it is made for."""
    refusals.check_refusals(ejk_implementation.implementation, ejk_implementation.cases)


def test_sharding_fields(ejk_implementation: FamilyTarget) -> None:
    """An implementation that serves a call handles what only shards of that call have."""
    implementation = ejk_implementation.implementation
    for op, case in ejk_implementation.cases:
        if not claims.record_refusals(op, implementation, abstract_record(op, case)):
            claims.check_sharding_fields(op, implementation, case)


def test_handles(ejk_claim: FamilyTarget) -> None:
    """An argument in `handles` makes a difference in some case."""
    claims.check_claim(ejk_claim.implementation, ejk_claim.name, ejk_claim.cases)


@unless(claimed_gradient_refused)
def test_gives_gradient(ejk_gradient: FamilyTarget) -> None:
    """A gradient in `gradients` is produced."""
    implementation, name = ejk_gradient.implementation, ejk_gradient.name
    op, case = claims.gradient_case(implementation, name, ejk_gradient.cases)
    claims.check_gradient_claim(op, implementation, name, case)
