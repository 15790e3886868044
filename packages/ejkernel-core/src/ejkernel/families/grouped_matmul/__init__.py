"""The grouped matmul family: the record its operations lower to and its meaning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.grouped_matmul.record import (
    UNASSIGNED_ROW_CHOICES,
    GroupedMatmul,
    accumulator,
    columns,
    group_row_bounds,
    lhs_and_scale_gradients,
    product_sum_dtype,
    rows,
    running_sum,
    scaled_matrices,
    spread,
)
from ejkernel.families.grouped_matmul.reference import reference
from ejkernel.planning.requests import PADDING, UNUSED

__all__ = [
    "EXPERT_PARALLELISM_HINT",
    "FAMILY",
    "UNASSIGNED_ROW_CHOICES",
    "GroupedMatmul",
    "accumulator",
    "apply_shard_offsets",
    "axes",
    "columns",
    "group_row_bounds",
    "lhs_and_scale_gradients",
    "product_sum_dtype",
    "reference",
    "requests",
    "rows",
    "running_sum",
    "scaled_matrices",
    "spread",
]


def apply_shard_offsets(record: GroupedMatmul, offsets: Mapping[str, jax.Array]) -> GroupedMatmul:
    """Makes one shard's record mean its part of the global call: the groups have the rows that the shard has."""
    if "m" not in offsets:
        return record
    ends = jnp.cumsum(jnp.maximum(record.group_sizes, 0), dtype=jnp.int32) - offsets["m"]
    local = jnp.clip(ends, 0, record.lhs.shape[0])
    return dataclasses.replace(record, group_sizes=jnp.diff(local, prepend=0).astype(jnp.int32))


def axes(record: GroupedMatmul) -> dict[str, str]:
    """Returns axis letters of a record's fields and of its output."""
    return {
        "lhs": "m k",
        "rhs": "e n k" if record.transpose_rhs else "e k n",
        "group_sizes": "g",
        "group_offset": "",
        "existing_out": "m n",
        "rhs_scale": "e q c n",
        "rhs_bias": "e c n",
        "lhs_scale": "m l",
        "output": "m n",
    }


EXPERT_PARALLELISM_HINT = (
    "give each device its own experts inside jax.shard_map, as examples/moe.py does: "
    "docs/operations/grouped_matmul.md, 'A whole expert layer'"
)


def requests(record: GroupedMatmul) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the groups, with their matrices, and the rows, which share those."""
    owner, matrices = _matrix_of_each_row(record), np.arange(record.rhs.shape[0])
    rows = np.where(owner >= 0, np.arange(owner.size), PADDING)
    if record.existing_out is None and record.left_over == "zero":
        return {"m": owner, "e": matrices}, {"m": rows}
    # Unassigned rows keep their earlier values.
    unassigned = [
        {n: np.where(owner >= 0, x, UNUSED)[:, None] for n in ("output", "existing_out")} for x in (owner, rows)
    ]
    return {"m": owner, "e": matrices, **unassigned[0]}, {"m": rows, **unassigned[1]}


def _matrix_of_each_row(record: GroupedMatmul) -> np.ndarray:
    """Returns the matrix of every row, [M]; `PADDING` for rows without one."""
    (first, end), row = (np.asarray(x) for x in group_row_bounds(record)), np.arange(record.lhs.shape[0])
    owns = (row >= first[:, None]) & (row < end[:, None])
    return np.where(owns.any(axis=0), owns.argmax(axis=0), PADDING)


FAMILY = Family(
    name="grouped_matmul",
    record=GroupedMatmul,
    differentiable=("lhs", "rhs", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale"),
    dtype=lambda record: record.lhs.dtype,
    head_dims=lambda record: (record.lhs.shape[-1], columns(record)),
    axes=axes,
    shardable="mn",
    apply_shard_offsets=apply_shard_offsets,
    unsplittable_axis_hints={"e": EXPERT_PARALLELISM_HINT},
    reference=reference,
    requests=requests,
)
