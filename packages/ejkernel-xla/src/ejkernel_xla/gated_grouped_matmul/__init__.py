"""The gated grouped matmul in XLA: a gather, the grouped matmul and the activation, one after the other."""

from ejkernel.families.gated_grouped_matmul import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=NO_CHOICE),)
