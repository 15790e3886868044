"""The gated grouped matmul in XLA: a gather, the grouped matmul and the activation, one after the other."""

from ejkernel.families.gated_grouped_matmul import FAMILY
from ejkernel_xla.fixed_tiles import ROW_ORDER, symbolic_sizes_limit
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY, config=ROW_ORDER, invariant_to=frozenset({"batch"}), invariance_limits=symbolic_sizes_limit
    ),
)
