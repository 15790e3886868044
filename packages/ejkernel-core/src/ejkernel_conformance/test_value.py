"""The forward pass against the reference."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_value(ejk_subject: Subject) -> None:
    """The output under jit is the reference's."""
    checks.check_value(ejk_subject)


@unless(refused("forward"))
def test_shapes(ejk_subject: Subject) -> None:
    """Output and residuals have the reference's structure, shapes and dtypes; nothing is run."""
    checks.check_shapes(ejk_subject)


@unless(refused("forward"))
def test_residuals(ejk_subject: Subject) -> None:
    """The residuals are those of the family, so that another implementation's backward pass can use them."""
    checks.check_residuals(ejk_subject)


@unless(refused("forward"))
def test_eager_equals_jit(ejk_subject: Subject) -> None:
    """The public function gives the same result with and without jit."""
    checks.check_eager(ejk_subject)
