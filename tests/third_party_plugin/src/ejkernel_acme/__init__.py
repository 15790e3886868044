"""Acme's backend: declarations only, so that it imports without what the kernels need."""

from ejkernel.ops import Implementation, Op, hookimpl
from ejkernel_acme import attention, scaled_sum

__all__ = ["ejkernel_implementations", "ejkernel_ops"]


@hookimpl
def ejkernel_ops() -> tuple[Op, ...]:
    """Operations that ejkernel does not have."""
    return (scaled_sum.OP,)


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """A faster way to an operation of ejkernel's, and the way to Acme's own."""
    return (attention.IMPLEMENTATION, scaled_sum.IMPLEMENTATION)
