"""Ring attention in Triton: every ring step is one call of tiled attention."""

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_triton import tiled_attention

FAMILY = "ejkernel_triton.ring_attention"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return tuple(
        ring_implementation(tiled, forward=f"{FAMILY}.forward:forward", backward=f"{FAMILY}.backward:backward")
        for tiled in tiled_attention.implementations()
    )
