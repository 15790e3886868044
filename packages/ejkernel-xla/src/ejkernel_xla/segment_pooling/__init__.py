"""Segment pooling in XLA."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.segment_pooling import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="segment_pooling",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.segment_pooling.forward:forward",
        backward="ejkernel_xla.segment_pooling.backward:backward",
        gradients=frozenset({"values"}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=frozenset({"lengths", "ranges"}),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.TokenTiles, faces=tiles.FACES
        ),
    ),
)
