"""Tangents of implementations with a `forward_mode` function against those of the reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_forward_mode(ejk_forward_mode: Subject) -> None:
    """Output and tangents in a `forward_mode` block are those of the reference, in the case with the most options."""
    checks.check_forward_mode(ejk_forward_mode)
