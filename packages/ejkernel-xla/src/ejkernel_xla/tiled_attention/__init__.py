"""Tiled softmax attention in XLA: forward and backward passes that visit only the tiles that are not masked."""

from ejkernel.families.tiled_attention import DROPOUT, FAMILY, MASKS, ROUNDING, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.tiled_attention import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="tiled_attention",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.tiled_attention.forward:forward",
        backward="ejkernel_xla.tiled_attention.backward:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=MASKS | SOFTMAX | DROPOUT | ROUNDING | {"bias", "pattern"},
        ),
        config=ConfigSpace(
            reads=frozenset({"q_blocksize", "kv_blocksize"}), heuristic=tiles.heuristic, candidates=tiles.candidates
        ),
    ),
)
