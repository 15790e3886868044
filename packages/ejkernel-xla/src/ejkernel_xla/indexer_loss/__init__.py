"""The indexer's loss in XLA: attention's weights of listed keys, a tile of queries at a time."""

from ejkernel.families.indexer_loss import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.indexer_loss import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(config, forward=config.QueryTile, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
