"""Ring attention in Mosaic GPU, for NVIDIA's Hopper: every ring step is one kernel of tiled attention."""

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_pallas.gpu import tiled_attention

PACKAGE = "ejkernel_pallas.gpu.ring_attention"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, for calls without functions of pairs."""
    plain, _ = tiled_attention.implementations()
    return (ring_implementation(plain, forward=f"{PACKAGE}.forward:forward", backward=f"{PACKAGE}.backward:backward"),)
