"""Selected attention in XLA: each block of keys is read once, by all the queries that list it."""

from ejkernel.families.selected_attention import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.selected_attention import config

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=ConfigSpace.of(config, forward=config.SelectedTiles)),)
