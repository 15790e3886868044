"""Paged softmax attention in XLA: an online softmax that gathers only the tiles of keys that some query row attends."""

from ejkernel.families.paged_attention import FAMILY
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.paged_attention import config
from ejkernel_xla.registration import config_space, xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "paged_attention",
        backward=None,
        handles=optional_fields(FAMILY.record),
        config=config_space(config, config.PagedTiles),
    ),
)
