"""The quantised matmul in XLA: the matrix is dequantised once, at x's width, and multiplied by the vendor's library."""

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, symbolic=False, config=NO_CHOICE),)
