"""Grouped matmul in XLA: group after group, in tiles of rows, so that no product is computed and thrown away."""

from ejkernel.families.grouped_matmul import FAMILY
from ejkernel.ops import ConfigSpace
from ejkernel_xla.grouped_matmul import config
from ejkernel_xla.registration import FLOAT_DTYPES, xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        dtypes=FLOAT_DTYPES | {"float8_e4m3fn", "float8_e5m2"},
        config=ConfigSpace.of(config, forward=config.RowTiles, fixed_if_invariant=("batch_invariant",)),
        invariant_to=frozenset({"batch"}),
    ),
)
