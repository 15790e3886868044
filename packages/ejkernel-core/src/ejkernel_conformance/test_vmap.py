"""Tests both passes under `jax.vmap`."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_vmap(ejk_subject: Subject) -> None:
    """Output and gradients under `jax.vmap` are the reference's; every array of the call is mapped."""
    checks.check_vmap(ejk_subject)


@unless(refused("forward"))
def test_vmap_shared(ejk_kernel_indexed: Subject) -> None:
    """Output and gradients under `jax.vmap` are the reference's if mapped calls share masks, ids, lengths and
    tables.
    """
    checks.check_vmap(ejk_kernel_indexed, integers_shared=True)
