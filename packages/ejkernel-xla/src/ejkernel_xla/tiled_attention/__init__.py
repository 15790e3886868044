"""Tiled softmax attention in XLA: forward and backward passes that visit only the tiles that are not masked."""

from ejkernel.families.tiled_attention import FAMILY
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.arguments import optional_fields
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
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            # Everyone's fallback honours every field; the conformance suite fails for one that it does not.
            handles=frozenset(optional_fields(FAMILY.record)) | {"lse_cotangent"},
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic,
            candidates=tiles.candidates,
            forward=tiles.ChunkedSoftmax,
            faces=tiles.FACES,
        ),
    ),
)
