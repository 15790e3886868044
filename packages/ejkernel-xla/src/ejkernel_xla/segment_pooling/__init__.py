"""Segment pooling in XLA."""

from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.segment_pooling import config

IMPLEMENTATIONS = (
    xla_implementation(
        "segment_pooling",
        gradients={"values"},
        handles={"lengths", "ranges"},
        config=ConfigSpace.of(config, forward=config.TokenTiles),
    ),
)
