"""Gather-reduce in XLA: one gather after another, fused with the sum."""

from ejkernel.families.gather_reduce import FAMILY
from ejkernel_xla.fixed_tiles import ROW_ORDER, symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY, config=ROW_ORDER, invariant_to=frozenset({"batch"}), invariance_limits=symbolic_sizes_limit
    ),
)
