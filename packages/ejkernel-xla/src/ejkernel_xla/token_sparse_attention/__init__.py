"""Token-sparse attention in XLA: the listed keys of a tile of queries are gathered and attended to."""

from ejkernel.families.token_sparse_attention import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel.types.arguments import optional_fields
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.token_sparse_attention import config

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        handles={*optional_fields(FAMILY.record), "lse_cotangent"},
        config=ConfigSpace.of(config, forward=config.QueryTile, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=symbolic_sizes_limit,
    ),
)
