"""Grouped matmul in XLA: group after group, in tiles of rows, so that no product is computed and thrown away."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.grouped_matmul import tiles

OPTIONAL = ("group_offset", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale", "transpose_rhs", "precision")

IMPLEMENTATIONS = (
    Implementation(
        family="grouped_matmul",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.grouped_matmul.forward:forward",
        backward="ejkernel_xla.grouped_matmul.backward:backward",
        gradients=frozenset({"lhs", "rhs", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale"}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"}),
            handles=frozenset(OPTIONAL),
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.RowTiles, faces=tiles.FACES
        ),
    ),
)
