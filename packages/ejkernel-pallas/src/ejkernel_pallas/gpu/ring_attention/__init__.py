"""Ring attention in Mosaic GPU, for NVIDIA's Hopper: every ring step is one kernel of tiled attention."""

import dataclasses

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_pallas.gpu import tiled_attention

PACKAGE = "ejkernel_pallas.gpu.ring_attention"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, for calls without functions of pairs and without positions, of which the kernels have
    no gradients.
    """
    plain, _ = tiled_attention.implementations()
    handles = plain.requires.handles - set(tiled_attention.POSITIONS)
    plain = dataclasses.replace(plain, requires=dataclasses.replace(plain.requires, handles=handles))
    return (ring_implementation(plain, forward=f"{PACKAGE}.forward:forward", backward=f"{PACKAGE}.backward:backward"),)
