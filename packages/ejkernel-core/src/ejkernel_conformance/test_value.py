"""The forward pass against the reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_value(ejk_subject: Subject) -> None:
    """Under jit."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_value(ejk_subject)


def test_shapes(ejk_subject: Subject) -> None:
    """Structure, shapes and dtypes of output and residuals, without running."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_shapes(ejk_subject)


def test_residuals(ejk_subject: Subject) -> None:
    """What is left for a backward pass, which may be another implementation's."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_residuals(ejk_subject)


def test_eager_equals_jit(ejk_subject: Subject) -> None:
    """Through the public function."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_eager(ejk_subject)
