"""Tiled softmax attention in XLA: both passes loop over full and partial tiles, and skip the empty ones."""

from ejkernel.families.tiled_attention import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.tiled_attention import config

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        handles={*optional_fields(FAMILY.record), "lse_cotangent"},
        forward_mode="ejkernel_xla.tiled_attention.forward_mode:forward_mode",
        config=ConfigSpace.of(config, forward=config.ChunkedSoftmax, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        invariance_limits=config.invariance_limits,
    ),
)
