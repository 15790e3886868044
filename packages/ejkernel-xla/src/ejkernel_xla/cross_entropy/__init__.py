"""The cross-entropy of token logits in XLA: the logits exist a block at a time."""

from ejkernel.families.cross_entropy import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.cross_entropy import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        config=ConfigSpace.of(config, forward=config.LogitBlocks, fixed_if_invariant=("block_t", "batch_invariant")),
        invariant_to=frozenset({"batch"}),
        invariance_limits=config.invariance_limits,
    ),
)
