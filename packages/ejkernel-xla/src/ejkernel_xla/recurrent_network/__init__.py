"""Recurrent networks in XLA: every product that does not wait for a state is taken over all tokens at once."""

from ejkernel.families.recurrent_network import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.recurrent_network import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(
            config, forward=config.TokenBlocks, fixed_if_invariant=("block_t", "unroll", "batch_invariant")
        ),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
