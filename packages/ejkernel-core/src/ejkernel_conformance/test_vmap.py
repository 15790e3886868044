"""Both passes under `jax.vmap`."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_vmap(ejk_subject: Subject) -> None:
    """The output, and the gradients where there are any; every array of the call is mapped."""
    skip_if_refused(ejk_subject, "forward")
    checks.check_vmap(ejk_subject)


def test_vmap_shared(ejk_kernel_indexed: Subject) -> None:
    """The same with masks, ids, lengths and tables that all mapped calls share."""
    skip_if_refused(ejk_kernel_indexed, "forward")
    checks.check_vmap(ejk_kernel_indexed, integers_shared=True)
