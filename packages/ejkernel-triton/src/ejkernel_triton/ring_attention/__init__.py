"""Ring attention in Triton: every ring step is one call of tiled attention."""

from ejkernel.ops import Implementation
from ejkernel.ops.ring_registration import ring_implementation
from ejkernel_triton import tiled_attention

PACKAGE_NAME = "ejkernel_triton.ring_attention"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, for calls without functions of pairs."""
    plain, _ = tiled_attention.implementations()
    passes = {name: f"{PACKAGE_NAME}.{name}:{name}" for name in ("forward", "backward")}
    return (ring_implementation(plain, **passes),)
