"""The backward pass against the differentiated reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward", "backward"))
def test_gradients(ejk_differentiable: Subject) -> None:
    """Gradients of every floating argument, at once."""
    checks.check_gradients(ejk_differentiable)
