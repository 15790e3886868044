"""Linear recurrences in XLA: chunks of tokens as matrix products, and only states between them."""

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.linear_recurrence import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(
            config, forward=config.RecurrenceChunk, fixed_if_invariant=("chunk_size", "batch_invariant", "tile_rows")
        ),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=config.invariance_limits,
    ),
)
