"""The same rows in different calls in a `batch_invariant` block are compared bit for bit."""

from ejkernel_conformance import invariance
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.served import hardware_refused, unless


@unless(hardware_refused)
def test_batch_invariance(ejk_invariance: FamilyTarget) -> None:
    """The bits of a row do not change with what an implementation claims to be invariant to."""
    invariance.check_invariance(ejk_invariance)
