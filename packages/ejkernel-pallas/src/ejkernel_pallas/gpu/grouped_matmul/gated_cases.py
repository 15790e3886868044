"""Conformance cases of the gated product: tiles of every kind of group, rows as they are and gathered."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import tagged
from ejkernel.modules.operations.gated_grouped_matmul import GatedGroupedMatmulArguments
from ejkernel.ops.model import Case

# Empty groups, groups of fewer rows than a warpgroup has, of fewer than a tile and of several, and rows left over.
GROUPS = (40, 0, 63, 1, 130, 200)
# As above, with so few rows in the mean that one warpgroup multiplies the last of a group.
SMALL_GROUPS = (40, 0, 63, 1, 130, 64, 65, 0, 5, 120)
# name, tokens, rows (None without indices), contracted, columns, rows of each group, dtype, options
_ROWS: tuple[tuple[str, int, int | None, int, int, tuple[int, ...], Any, dict[str, Any]], ...] = (
    ("tiles", 520, None, 128, 192, GROUPS, jnp.bfloat16, {"activation": "gelu"}),
    ("tiles of gathered rows", 96, 520, 320, 256, GROUPS, jnp.bfloat16, {}),
    ("tiles of float16", 96, 520, 64, 64, GROUPS, jnp.float16, {"activation": "gelu"}),
    ("tiles of few rows", 96, 520, 128, 192, SMALL_GROUPS, jnp.bfloat16, {}),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """The conformance cases of each operation, by its name."""
    return {"gated_grouped_matmul": tuple(_case(*row) for row in _ROWS)}


def _case(
    name: str,
    tokens: int,
    rows: int | None,
    contracted: int,
    columns: int,
    groups: tuple[int, ...],
    dtype: Any,
    options: dict[str, Any],
) -> Case:
    def make(key: jax.Array) -> GatedGroupedMatmulArguments:
        keys = jax.random.split(key, 3)
        lhs = jax.random.normal(keys[0], (tokens, contracted))
        rhs = jax.random.normal(keys[1], (len(groups), contracted, 2 * columns)) * contracted**-0.5
        # Some name no token.
        indices = None if rows is None else jax.random.randint(keys[2], (rows,), -1, tokens + 1, jnp.int32)
        return GatedGroupedMatmulArguments(
            lhs=lhs.astype(dtype),
            rhs=rhs.astype(dtype),
            group_sizes=jnp.array(groups, jnp.int32),
            indices=indices,
            **options,
        )

    return tagged(name, make, (*(() if rows is None else ("indices",)), *options), ())
