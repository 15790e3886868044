"""The quantised matmul in XLA: the matrix is dequantised once, at x's width, and multiplied by the vendor's library."""

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel_xla.fixed_tiles import ROW_ORDER, symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY, config=ROW_ORDER, invariant_to=frozenset({"batch"}), invariance_limits=symbolic_sizes_limit
    ),
)
