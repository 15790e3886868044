"""RWKV-4's weighted average in XLA: a scan over tokens, and back over them."""

from ejkernel.families.wkv import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.wkv import config

IMPLEMENTATIONS = (
    xla_implementation(
        "wkv",
        gradients=FAMILY.differentiable,
        handles=optional_fields(FAMILY.record),
        config=ConfigSpace.of(config, forward=config.TokenLoop),
    ),
)
