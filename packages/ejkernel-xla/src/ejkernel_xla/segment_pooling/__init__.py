"""Segment pooling in XLA."""

from ejkernel.families.segment_pooling import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.segment_pooling import config

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(config, forward=config.TokenTiles, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "packing"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
