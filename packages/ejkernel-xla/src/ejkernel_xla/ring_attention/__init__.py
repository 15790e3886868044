"""Ring attention in XLA: the tile loops of tiled attention, over one device's keys after the other."""

from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.ring_attention import config
from ejkernel_xla.tiled_attention.config import PUBLIC_FIELDS, ChunkedSoftmax

IMPLEMENTATIONS = (
    xla_implementation(
        "ring_attention",
        gradients={"query", "key", "value", "bias", "softmax_aux"},
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
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=ChunkedSoftmax,
            public_fields=PUBLIC_FIELDS,
        ),
    ),
)
