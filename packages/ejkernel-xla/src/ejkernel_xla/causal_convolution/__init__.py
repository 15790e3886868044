"""The causal convolution in XLA: one fused sum over shifted views."""

from ejkernel.families.causal_convolution import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=NO_CHOICE),)
