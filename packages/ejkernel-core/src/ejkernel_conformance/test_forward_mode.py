"""Tangents of implementations with a `forward_mode` function against those of the reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_forward_mode(ejk_forward_mode: Subject) -> None:
    """Output and tangents of a call in a `forward_mode` block, of the case of its operation with most options."""
    checks.check_forward_mode(ejk_forward_mode)
