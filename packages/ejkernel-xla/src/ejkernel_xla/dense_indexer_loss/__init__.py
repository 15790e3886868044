"""The dense indexer loss in XLA: tiles of attention's and the indexer's scores, computed again in each pass."""

from ejkernel.families.dense_indexer_loss import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.dense_indexer_loss import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (xla_implementation(FAMILY, config=ConfigSpace.of(config, forward=config.LossTiles)),)
