"""Softmax attention with its weights in XLA: whole rows of the weights at a time, each made once."""

from ejkernel.families.tiled_attention import DROPOUT, FAMILY, MASKS, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.attention_weights import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="attention_weights",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.attention_weights.forward:forward",
        backward="ejkernel_xla.attention_weights.backward:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=MASKS | SOFTMAX | DROPOUT | {"bias", "logits_dtype"},
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.WeightRows, faces=tiles.FACES
        ),
    ),
)
