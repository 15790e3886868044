"""Both passes under `jax.vmap`."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_vmap(ejk_subject: Subject) -> None:
    """The output, and the gradients where there are any; every array of the call is mapped."""
    checks.check_vmap(ejk_subject)


@unless(refused("forward"))
def test_vmap_shared(ejk_kernel_indexed: Subject) -> None:
    """The same with masks, ids, lengths and tables that all mapped calls share."""
    checks.check_vmap(ejk_kernel_indexed, integers_shared=True)
