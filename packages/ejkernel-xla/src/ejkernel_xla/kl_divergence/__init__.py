"""The KL divergence in XLA: fused reductions over the logits, which are read in place."""

from ejkernel.families.kl_divergence import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=NO_CHOICE),)
