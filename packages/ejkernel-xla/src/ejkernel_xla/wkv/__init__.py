"""RWKV-4's weighted average in XLA: a scan over tokens, and back over them."""

from ejkernel.families.wkv import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.wkv import config

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=ConfigSpace.of(config, forward=config.TokenLoop)),)
