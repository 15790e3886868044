"""Both passes under `jax.vmap`, every array of the call mapped."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_vmap(ejk_subject: Subject) -> None:
    """The output, and the gradients where there are any."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_vmap(ejk_subject)
