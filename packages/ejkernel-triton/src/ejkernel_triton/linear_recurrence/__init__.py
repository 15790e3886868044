"""Linear recurrences in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import Implementation
from ejkernel_triton.linear_recurrence import chunked, decode, delta


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations of recurrences and the delta rule, in both passes, and of decode steps."""
    return (*chunked.implementations(), *delta.implementations(), *decode.implementations())
