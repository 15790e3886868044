"""The lightning indexer in XLA: tiles of scores, merged into the largest of each query."""

from ejkernel.families.lightning_indexer import FAMILY
from ejkernel_xla.lightning_indexer import config
from ejkernel_xla.registration import config_space, xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "lightning_indexer",
        gradients=FAMILY.differentiable,
        handles=(),
        config=config_space(config, config.IndexerTiles),
        symbolic=False,
    ),
)
