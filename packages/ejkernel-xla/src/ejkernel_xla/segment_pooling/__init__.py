"""Segment pooling in XLA."""

from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.segment_pooling import tiles

IMPLEMENTATIONS = (
    xla_implementation(
        "segment_pooling",
        gradients={"values"},
        handles={"lengths", "ranges"},
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.TokenTiles, faces=tiles.FACES
        ),
    ),
)
