"""Ring attention in Triton: every step is one call of tiled attention."""

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_triton import tiled_attention

PASSES = "ejkernel_triton.ring_attention.passes"


def implementations() -> tuple[Implementation, ...]:
    """One implementation."""
    return tuple(
        ring_implementation(tiled, forward=f"{PASSES}:forward", backward=f"{PASSES}:backward")
        for tiled in tiled_attention.implementations()
    )
