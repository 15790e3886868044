"""Grouped matmul in XLA: group after group, in tiles of rows, so that no product is computed and thrown away."""

from ejkernel.ops import ConfigSpace
from ejkernel_xla.grouped_matmul import config
from ejkernel_xla.registration import FLOATS, xla_implementation

OPTIONAL = ("group_offset", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale", "transpose_rhs", "precision")

IMPLEMENTATIONS = (
    xla_implementation(
        "grouped_matmul",
        gradients={"lhs", "rhs", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale"},
        dtypes=FLOATS | {"float8_e4m3fn", "float8_e5m2"},
        handles=OPTIONAL,
        config=ConfigSpace.of(config, forward=config.RowTiles),
    ),
)
