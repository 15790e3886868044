"""The forward pass against the reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_value(ejk_subject: Subject) -> None:
    """Under jit."""
    checks.check_value(ejk_subject)


@unless(refused("forward"))
def test_shapes(ejk_subject: Subject) -> None:
    """Structure, shapes and dtypes of output and residuals, without running."""
    checks.check_shapes(ejk_subject)


@unless(refused("forward"))
def test_residuals(ejk_subject: Subject) -> None:
    """What is left for a backward pass, which may be another implementation's."""
    checks.check_residuals(ejk_subject)


@unless(refused("forward"))
def test_eager_equals_jit(ejk_subject: Subject) -> None:
    """Through the public function."""
    checks.check_eager(ejk_subject)
