"""The selective scan in XLA: chunks of tokens, of which only the states between them are kept."""

from ejkernel.families.selective_scan import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.selective_scan import config

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(config, forward=config.ScanSteps, fixed_if_invariant=("associative", "batch_invariant")),
        invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
