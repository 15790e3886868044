"""Paged softmax attention in XLA: an online softmax that gathers only the tiles of keys that some query row attends."""

from ejkernel.families.paged_attention import FAMILY
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.arguments import optional_fields
from ejkernel_xla.paged_attention import tiles

IMPLEMENTATIONS = (
    Implementation(
        family="paged_attention",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.paged_attention.forward:forward",
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            # Everyone's fallback honours every field; the conformance suite fails for one that it does not.
            handles=frozenset(optional_fields(FAMILY.record)),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.PagedTiles, faces=tiles.FACES
        ),
    ),
)
