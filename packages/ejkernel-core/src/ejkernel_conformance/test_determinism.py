"""The same call twice, bit by bit."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_determinism(ejk_subject: Subject) -> None:
    """The output."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_determinism(ejk_subject)


def test_gradient_determinism(ejk_differentiable: Subject) -> None:
    """The gradients."""
    skip_if_refused(ejk_differentiable, "forward", "backward")
    checks.check_gradient_determinism(ejk_differentiable)
