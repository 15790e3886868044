"""Tiled softmax attention in XLA: forward and backward passes that visit only the tiles that are not masked."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.tiled_attention import tiles

OPS = ("flash_attention",)

REQUIRES = Requires(
    devices=frozenset({"cpu", "gpu", "tpu"}),
    dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
    handles=frozenset(
        {
            "bias",
            "mask",
            "q_segment_ids",
            "kv_segment_ids",
            "q_positions",
            "kv_positions",
            "softmax_aux",
            "dropout_seed",
            "dropout_origin",
            "dropout_prob",
            "causal",
            "sliding_window",
            "logits_soft_cap",
            "normalize_output",
            "precision",
            "logits_dtype",
        }
    ),
)

IMPLEMENTATIONS = tuple(
    Implementation(
        op=op,
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.tiled_attention.forward:forward",
        backward="ejkernel_xla.tiled_attention.backward:backward",
        gradients=frozenset({"query", "key", "value", "bias", "softmax_aux"}),
        requires=REQUIRES,
        config=ConfigSpace(
            reads=frozenset({"q_blocksize", "kv_blocksize"}), heuristic=tiles.heuristic, candidates=tiles.candidates
        ),
    )
    for op in OPS
)
