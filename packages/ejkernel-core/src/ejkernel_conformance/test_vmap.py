"""Both passes under `jax.vmap`, every array of the call mapped."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_vmap(ejk_subject: Subject) -> None:
    """The output."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_vmap(ejk_subject)


def test_vmapped_gradients(ejk_differentiable: Subject) -> None:
    """The gradients."""
    skip_if_refused(ejk_differentiable, "forward", "backward")
    checks.check_vmapped_gradients(ejk_differentiable)
