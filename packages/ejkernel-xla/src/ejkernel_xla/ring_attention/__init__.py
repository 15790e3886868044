"""Ring attention in XLA: the tile loops of tiled attention, over one device's keys after the other."""

from ejkernel.families.ring_attention import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.ring_attention import config
from ejkernel_xla.tiled_attention.config import PUBLIC_FIELDS, ChunkedSoftmax

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        handles={*optional_fields(FAMILY.record), "lse_cotangent"},
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=ChunkedSoftmax,
            public_fields=PUBLIC_FIELDS,
        ),
    ),
)
