"""Both passes in a loop, on GPUs: XLA fuses kernels there with the slices that a loop gives and takes."""

from ejkernel_conformance import checks
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_loop(ejk_kernel_on_gpu: Subject) -> None:
    """The output, and the gradients where there are any; every array of the call is a slice."""
    checks.check_loop(ejk_kernel_on_gpu)
