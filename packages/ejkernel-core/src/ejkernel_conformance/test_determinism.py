"""The same call twice, bit by bit."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_determinism(ejk_subject: Subject) -> None:
    """Two runs give the same output, bit by bit."""
    checks.check_determinism(ejk_subject)


@unless(refused("forward", "backward"))
def test_gradient_determinism(ejk_differentiable: Subject) -> None:
    """Two runs give the same gradients, bit by bit."""
    checks.check_gradient_determinism(ejk_differentiable)
