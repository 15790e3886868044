"""NaN in tokens that take part in nothing."""

from ejkernel_conformance import padding
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_padding(ejk_padded: Subject) -> None:
    """It reaches no output."""
    skip_if_refused(ejk_padded, "forward")
    padding.check_padding(ejk_padded)


def test_padding_gradients(ejk_padded_differentiable: Subject) -> None:
    """It reaches no gradient."""
    skip_if_refused(ejk_padded_differentiable, "forward", "backward")
    padding.check_padding_gradients(ejk_padded_differentiable)
