"""Linear recurrences in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import Implementation
from ejkernel_triton.linear_recurrence import chunked, decode, delta, low_rank, steps


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations of recurrences, the delta rule and the low-rank term, in both passes, of decode
    steps, and of recurrences token by token.
    """
    return (
        *chunked.implementations(),
        *delta.implementations(),
        *low_rank.implementations(),
        *decode.implementations(),
        *steps.implementations(),
    )
