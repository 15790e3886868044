"""The selective scan in XLA: chunks of tokens, of which only the states between them are kept."""

from ejkernel.families.selective_scan import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.selective_scan import config

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=ConfigSpace.of(config, forward=config.ScanSteps)),)
