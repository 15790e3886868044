"""The causal convolution in XLA: one fused sum over shifted views."""

from ejkernel.families.causal_convolution import FAMILY
from ejkernel_xla.fixed_tiles import ROW_ORDER, symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ROW_ORDER,
        invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
