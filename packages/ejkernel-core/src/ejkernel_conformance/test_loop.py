"""Tests both passes in a loop, on GPUs: there XLA fuses kernels with the slices that a loop reads and writes."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_loop(ejk_kernel_on_gpu: Subject) -> None:
    """Output and gradients in a loop are the reference's; every array of the call is a slice."""
    checks.check_loop(ejk_kernel_on_gpu)
