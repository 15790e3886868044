"""The same rows in other calls, bit by bit, in a `batch_invariant` block."""

from ejkernel_conformance import invariance
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.served import hardware_refused, unless


@unless(hardware_refused)
def test_batch_invariance(ejk_invariance: FamilyTarget) -> None:
    """The bits of a row do not change with what an implementation says that they do not depend on."""
    invariance.check_invariance(ejk_invariance)
