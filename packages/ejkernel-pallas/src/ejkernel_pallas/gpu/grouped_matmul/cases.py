"""Conformance cases of these kernels, which take whole swizzled rows of 16 bits: tiles of every kind of group."""

import jax.numpy as jnp

from ejkernel.modules.operations.cases.grouped_matmul import GroupedSizes, inputs
from ejkernel.modules.operations.cases.tables import Row, table
from ejkernel.modules.operations.grouped_matmul import GroupedMatmulArguments
from ejkernel.ops.model import Case

# Empty groups, groups of fewer rows than a warpgroup has, of fewer than a tile and of several, and rows left over.
UNEVEN = GroupedSizes(520, 128, 320, (40, 0, 63, 1, 130, 200), dtype=jnp.bfloat16)
# Whole tiles of 256 columns, in pairs: those that clusters share.
PAIRS = GroupedSizes(520, 256, 512, (130, 0, 63, 100, 1, 150), dtype=jnp.bfloat16)
SOME = GroupedSizes(520, 192, 192, (90, 33, 0, 211, 150), matrices=3, dtype=jnp.float16)


def _some() -> dict[str, object]:
    return {"group_offset": 1, "transpose_rhs": True, "preferred_element_type": jnp.float16}


def cases() -> dict[str, tuple[Case, ...]]:
    """The conformance cases of each operation, by its name."""
    rows: tuple[Row[GroupedSizes], ...] = (
        ("tiles", UNEVEN, lambda key: {}, (), ()),
        ("tiles in pairs", PAIRS, lambda key: {"preferred_element_type": jnp.bfloat16}, (), ()),
        ("tiles of some groups, transposed", SOME, lambda key: _some(), ("group_offset", "transpose_rhs"), ()),
    )
    return {"grouped_matmul": table(GroupedMatmulArguments, inputs, rows)}
