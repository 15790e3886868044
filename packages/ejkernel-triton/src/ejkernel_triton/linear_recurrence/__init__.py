"""Linear recurrences in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import Implementation
from ejkernel_triton.linear_recurrence import chunked, decode, delta


def implementations() -> tuple[Implementation, ...]:
    """Recurrences and the delta rule, in both passes, and decode steps; for the CPU too where Triton interprets."""
    return (*chunked.implementations(), *delta.implementations(), *decode.implementations())
