"""Defines what selected attention computes, in plain jnp.

Three branches share the query, each of them softmax attention as `ejkernel.families.tiled_attention` defines it:

    selected     the keys of the blocks that the query lists, or that are selected for it, up to its own
    compressed   one key and one value per block, for the blocks that end no later than the query's own key
    window       the newest `window_size` keys, the query's own among them

    o_i = g_slc_i * selected_i + g_cmp_i * compressed_i + g_swa_i * window_i

A branch whose fields are absent is left out, an absent gate is 1. The selected branch is always there.

Without `block_indices`, the blocks of a query are its own and those before it that weigh most in the compressed branch,
summed over the query heads of a KV head; of two that weigh the same the later. Without that branch nothing weighs
anything, and only its own is left. What is selected has no gradient.

With `block_tables`, the keys of each row are in pages.

Source: native sparse attention, Yuan et al. 2025, arXiv:2502.11089.
"""

import jax
import jax.numpy as jnp

from ejkernel.families import tiled_attention
from ejkernel.families.selected_attention.record import (
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    as_tiled_attention,
    compressed,
    query_positions,
    select,
    starts,
    sum_of_gated_branches,
    window,
    with_keys_in_rows,
)
from ejkernel.families.tiled_attention import TiledAttention


def reference(record: SelectedAttention) -> tuple[jax.Array, SelectedResiduals]:
    """Computes the result of the family in plain jnp, with a mask of every query and key; in float64 if `query` is
    float64, else in float32.
    """
    record = with_keys_in_rows(record)
    indices = select(record)
    records: dict[str, TiledAttention | None] = {
        "selected": _selected_branch_as_masked(record, indices),
        "compressed": compressed(record),
        "window": window(record),
    }
    branches: dict[str, BranchResiduals] = {}
    for name, one in records.items():
        if one is not None:
            output, residuals = tiled_attention.reference(one)
            branches[name] = BranchResiduals(output=output, lse=residuals.lse)
    selected = indices if record.block_indices is None else None
    return sum_of_gated_branches(record, branches), SelectedResiduals(**branches, block_indices=selected)


def _selected_branch_as_masked(record: SelectedAttention, indices: jax.Array) -> TiledAttention:
    """Returns the selected branch as attention under a mask."""
    key = jnp.arange(record.key.shape[1], dtype=jnp.int32)
    first = starts(record)[jnp.maximum(indices, 0)][..., None]
    listed = (indices[..., None] >= 0) & (key >= first) & (key < first + record.block_size)
    allowed = listed.any(axis=3) & (key <= query_positions(record)[:, :, None, None])
    group = record.query.shape[2] // record.key.shape[2]
    return as_tiled_attention(record, mask=jnp.repeat(allowed, group, axis=2).swapaxes(1, 2))
