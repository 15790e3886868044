"""The lightning indexer in XLA: tiles of scores, merged into the largest of each query."""

from ejkernel.families.lightning_indexer import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.lightning_indexer import config
from ejkernel_xla.registration import FLOAT_DTYPES, xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(
            config, forward=config.IndexerTiles, fixed_if_invariant=("whole_rows", "batch_invariant")
        ),
        dtypes=FLOAT_DTYPES | {"float8_e4m3fn"},
        invariant_to=frozenset({"batch", "padding", "chunking", "pages"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
