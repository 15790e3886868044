"""Both passes in a loop, on GPUs: XLA fuses kernels there with the slices that a loop gives and takes."""

from ejkernel_conformance import checks
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject


def test_loop(ejk_kernel_on_gpu: Subject) -> None:
    """The output, and the gradients where there are any; every array of the call is a slice."""
    skip_if_refused(ejk_kernel_on_gpu, "forward")
    checks.check_loop(ejk_kernel_on_gpu)
