"""The gated grouped matmul family: the record its operations lower to and its meaning."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.families import grouped_matmul
from ejkernel.families.contract import Family
from ejkernel.families.gated_grouped_matmul.record import (
    ACTIVATIONS,
    UNGATED_ACTIVATIONS,
    GatedGroupedMatmul,
    GateParameters,
    activate_products,
    activated_gate_times_factor,
    apply_gate,
    as_grouped_matmul,
    gathered_tokens,
    rows_with_a_token,
)
from ejkernel.families.gated_grouped_matmul.reference import reference
from ejkernel.families.grouped_matmul import EXPERT_PARALLELISM_HINT
from ejkernel.planning.requests import PADDING, UNUSED, claim_entries

__all__ = [
    "ACTIVATIONS",
    "FAMILY",
    "UNGATED_ACTIVATIONS",
    "GateParameters",
    "GatedGroupedMatmul",
    "activate_products",
    "activated_gate_times_factor",
    "apply_gate",
    "as_grouped_matmul",
    "axes",
    "gathered_tokens",
    "reference",
    "requests",
    "rows_with_a_token",
]


def axes(record: GatedGroupedMatmul) -> Mapping[str, Any]:
    """Returns the axis letters of a record's fields and of its output."""
    token = "m" if record.indices is None else "t"
    rhs = "e n k" if record.transpose_rhs else "e k n"
    arrays = {
        "lhs": f"{token} k",
        "rhs": rhs,
        "group_sizes": "e",
        "indices": "m",
        "rhs_bias": "e c n",
        "rhs_scale": "e s c n",
    }
    return {**arrays, "output": "m f"}


def requests(record: GatedGroupedMatmul) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the groups, with their matrices, and the tokens, which share those."""
    rows = record.lhs if record.indices is None else jnp.zeros((record.indices.shape[0], 1), record.lhs.dtype)
    (first, end), row = (
        (np.asarray(x) for x in grouped_matmul.group_row_bounds(as_grouped_matmul(record, rows, rows.dtype))),
        np.arange(rows.shape[0]),
    )
    is_group_row = (row >= first[:, None]) & (row < end[:, None])
    group, tokens = np.where(is_group_row.any(axis=0), is_group_row.argmax(axis=0), -1), record.lhs.shape[0]
    token = row if record.indices is None else np.asarray(record.indices)
    token = np.where((token >= 0) & (token < tokens), token, PADDING)
    left_over = PADDING if record.left_over == "zero" else UNUSED
    groups, used = np.full(tokens, UNUSED), (group >= 0) & (token >= 0)
    for m in np.flatnonzero(used):
        claim_entries(groups, token[m], group[m])
    return (
        {
            "lhs": groups[:, None],
            "output": np.where(group >= 0, group, left_over)[:, None],
            "e": np.arange(is_group_row.shape[0]),
        },
        {"lhs": np.arange(tokens)[:, None], "output": np.where(used, token, left_over)[:, None]},
    )


FAMILY = Family(
    name="gated_grouped_matmul",
    record=GatedGroupedMatmul,
    differentiable=("lhs", "rhs", "rhs_bias", "rhs_scale"),
    dtype=lambda record: record.lhs.dtype,
    head_dims=lambda record: (record.lhs.shape[-1], record.rhs.shape[-1]),
    axes=axes,
    shardable="",
    unsplittable_axis_hints={"e": EXPERT_PARALLELISM_HINT},
    reference=reference,
    requests=requests,
)
