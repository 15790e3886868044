"""The backward pass against the differentiated reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_gradients(ejk_differentiable: Subject) -> None:
    """Gradients of every floating argument, at once."""
    skip_if_refused(ejk_differentiable, "forward", "backward")
    checks.check_gradients(ejk_differentiable)


def test_gradients_after_another(ejk_differentiable: Subject) -> None:
    """Gradients of the family's record, from the residuals that another implementation's forward pass leaves."""
    skip_if_refused(ejk_differentiable, "forward", "backward")
    checks.check_gradients_after_another(ejk_differentiable)
