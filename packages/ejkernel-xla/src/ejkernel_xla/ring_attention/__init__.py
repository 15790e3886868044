"""Ring attention in XLA: the tile loops of tiled attention, over one device's keys after the other."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.ring_attention import tiles
from ejkernel_xla.tiled_attention.tiles import FACES, ChunkedSoftmax

IMPLEMENTATIONS = (
    Implementation(
        family="ring_attention",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.ring_attention.forward:forward",
        backward="ejkernel_xla.ring_attention.backward:backward",
        gradients=frozenset({"query", "key", "value", "bias", "softmax_aux"}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
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
                    "causal",
                    "sliding_window",
                    "logits_soft_cap",
                    "lse_cotangent",
                }
            ),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic,
            candidates=tiles.candidates,
            forward=ChunkedSoftmax,
            faces=FACES,
        ),
    ),
)
