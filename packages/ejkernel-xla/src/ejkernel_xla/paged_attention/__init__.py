"""Paged softmax attention in XLA: an online softmax that gathers only the tiles of keys that some query row attends."""

from ejkernel.families.paged_attention import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.paged_attention import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        backward=False,
        config=ConfigSpace.of(config, forward=config.PagedTiles, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "chunking", "pages"}),
    ),
)
