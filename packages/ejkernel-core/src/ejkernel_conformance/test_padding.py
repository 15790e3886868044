"""NaN in tokens that take part in nothing."""

from ejkernel_conformance import padding
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_padding(ejk_padded: Subject) -> None:
    """NaN in padding reaches no output."""
    padding.check_padding(ejk_padded)


@unless(refused("forward", "backward"))
def test_padding_gradients(ejk_padded_differentiable: Subject) -> None:
    """NaN in padding reaches no gradient."""
    padding.check_padding_gradients(ejk_padded_differentiable)
