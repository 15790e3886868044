"""Ring attention in Triton: every ring step is one call of tiled attention."""

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_triton import tiled_attention

PACKAGE_NAME = "ejkernel_triton.ring_attention"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return tuple(
        ring_implementation(
            tiled_implementation,
            forward=f"{PACKAGE_NAME}.forward:forward",
            backward=f"{PACKAGE_NAME}.backward:backward",
        )
        for tiled_implementation in tiled_attention.implementations()
    )
