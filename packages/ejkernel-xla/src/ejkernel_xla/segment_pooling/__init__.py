"""Segment pooling in XLA."""

from ejkernel_xla.registration import config_space, xla_implementation
from ejkernel_xla.segment_pooling import config

IMPLEMENTATIONS = (
    xla_implementation(
        "segment_pooling",
        gradients={"values"},
        handles={"lengths", "ranges"},
        config=config_space(config, config.TokenTiles),
    ),
)
