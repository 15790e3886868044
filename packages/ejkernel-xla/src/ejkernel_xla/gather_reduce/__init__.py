"""Gather-reduce in XLA: one gather after another, fused with the sum."""

from ejkernel.families.gather_reduce import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=NO_CHOICE),)
