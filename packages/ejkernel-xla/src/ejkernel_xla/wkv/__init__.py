"""RWKV-4's weighted average in XLA: a scan over tokens, and back over them."""

from ejkernel.families.wkv import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.wkv import config

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(config, forward=config.TokenLoop, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
