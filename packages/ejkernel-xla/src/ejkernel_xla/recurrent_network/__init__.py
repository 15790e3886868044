"""Recurrent networks in XLA: every product that does not wait for a state is taken over all tokens at once."""

from ejkernel.families.recurrent_network import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.recurrent_network import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "recurrent_network",
        gradients=FAMILY.differentiable,
        handles=optional_fields(FAMILY.record),
        config=ConfigSpace.of(config, forward=config.TokenBlocks),
    ),
)
