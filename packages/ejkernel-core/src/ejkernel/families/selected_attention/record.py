"""Defines the argument record of selected attention, and functions of the record alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import block_selection
from ejkernel.families.selected_attention.block_selection import BlockPositions
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.page_slots import has_page, rows_of_pages
from ejkernel.types.arguments import arguments, static


@arguments
class SelectedAttention:
    """Canonical input of one call. B batch, T queries, S keys, H query heads, Hk KV heads, M blocks, N listed blocks.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query. With block_tables [P, S, Hk, D], pages of S slots.
        value: [B, S, Hk, Dv], same dtype as query, or [P, S, Hk, Dv].
        block_indices: [B, T, Hk, N] int32, the blocks that a query reads; -1 is none. No row lists a block twice. None
            where they are selected, which takes the compressed branch.
        softmax_scale: Factor on the raw scores.
        block_size: Keys per block.
        selected_blocks: Blocks that are selected for a query, its own among them, where block_indices is None.
        block_starts: [M] int32 in ascending order, the first key of every block; None where block c starts at
            `c * block_size`. Of a block that reaches beyond the next one's start, the keys there are no query's that
            lists it: they belong to another sequence.
        compressed_key: [B, M, Hk, D], same dtype as query; with compressed_value: the compressed branch.
        compressed_value: [B, M, Hk, Dv], as above.
        compressed_segment_ids: [B, M] int32, of the compressed keys.
        q_segment_ids: [B, T] int32; with kv_segment_ids: equal ids >= 0 attend, < 0 is padding. With block_tables all
            keys of a row have id 0.
        kv_segment_ids: [B, S] int32; None with block_tables.
        q_positions: [B|1, T] int32, index of each query's own key; None where it is the query's index.
        g_slc: [B, T, H] floating, gate of the selected branch.
        g_cmp: [B, T, H] floating, gate of the compressed branch.
        g_swa: [B, T, H] floating, gate of the window.
        window_size: Keys of the window; None leaves that branch out.
        block_tables: [B, N] int, the pages of each row's keys, key s in page `s // S`. No query attends to keys of an
            entry that is no page. Compressed keys are not in pages.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    block_indices: jax.Array | None
    softmax_scale: float = static()
    block_size: int = static()
    selected_blocks: int = static(0)
    block_starts: jax.Array | None = None
    compressed_key: jax.Array | None = None
    compressed_value: jax.Array | None = None
    compressed_segment_ids: jax.Array | None = None
    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_positions: jax.Array | None = None
    g_slc: jax.Array | None = None
    g_cmp: jax.Array | None = None
    g_swa: jax.Array | None = None
    window_size: int | None = static(None)
    block_tables: jax.Array | None = None


@arguments
class BranchResiduals:
    """The residuals of a branch.

    Attributes:
        output: [B, T, H, Dv] in the query's dtype, before the gate.
        lse: [B, H, T] float32, log of the softmax denominator; -inf for empty rows.
    """

    output: jax.Array
    lse: jax.Array


@arguments
class SelectedResiduals:
    """The residuals of a forward pass.

    Attributes:
        selected: The selected branch.
        compressed: The compressed branch; None if the call has no compressed branch.
        window: The window branch; None if the call has no window.
        block_indices: [B, T, Hk, N] int32, the selected blocks; None if the caller passed `block_indices`.
    """

    selected: BranchResiduals
    compressed: BranchResiduals | None = None
    window: BranchResiduals | None = None
    block_indices: jax.Array | None = None


GATE_FIELD_BY_BRANCH = {"selected": "g_slc", "compressed": "g_cmp", "window": "g_swa"}
"""The field that gates each branch."""


def num_keys(record: SelectedAttention) -> int:
    """Returns the number of keys of a row, including those of absent pages."""
    size = record.key.shape[1]
    return size if record.block_tables is None else record.block_tables.shape[1] * size


def num_listable_blocks(record: SelectedAttention) -> int:
    """Returns how many blocks there are to list."""
    if record.block_starts is not None:
        return record.block_starts.shape[0]
    if record.compressed_key is not None:
        return record.compressed_key.shape[1]
    return cdiv(num_keys(record), record.block_size)


def blocks_per_query(record: SelectedAttention) -> int:
    """Returns how many blocks a query has room for."""
    return max(1, record.selected_blocks) if record.block_indices is None else record.block_indices.shape[3]


def starts(record: SelectedAttention) -> jax.Array:
    """Returns the first key of every block, int32 [M]."""
    block_starts = record.block_starts
    return (
        jnp.arange(num_listable_blocks(record), dtype=jnp.int32) * record.block_size
        if block_starts is None
        else block_starts
    )


def query_positions(record: SelectedAttention) -> jax.Array:
    """Returns the index of the key at each query's position, int32 [B|1, T]."""
    q_positions = record.q_positions
    return jnp.arange(record.query.shape[1], dtype=jnp.int32)[None] if q_positions is None else q_positions


def block_positions(record: SelectedAttention) -> BlockPositions:
    """Returns the positions of the blocks, to select among them."""
    return BlockPositions(
        starts=starts(record),
        size=record.block_size,
        query_positions=query_positions(record),
        query_segment_ids=record.q_segment_ids,
        block_segment_ids=record.compressed_segment_ids,
    )


def select(record: SelectedAttention) -> jax.Array:
    """Returns the blocks that each query of a record reads, [B, T, Hk, N] int32, in plain jnp: those given, or the
    selected.
    """
    if record.block_indices is not None:
        return record.block_indices
    keys, scale = record.compressed_key, record.softmax_scale
    if keys is None:  # without keys all weights are 0
        keys = record.key[:, :0]
    return block_selection.select_blocks(record.query, keys, scale, blocks_per_query(record), block_positions(record))


def compressed(record: SelectedAttention) -> TiledAttention | None:
    """Returns the compressed branch: a block's position is that of the last key it has room for."""
    if record.compressed_key is None or record.compressed_value is None:
        return None
    return as_tiled_attention(
        record,
        key=record.compressed_key,
        value=record.compressed_value,
        kv_segment_ids=record.compressed_segment_ids,
        q_positions=query_positions(record),
        kv_positions=(starts(record) + (record.block_size - 1))[None],
        causal=True,
    )


def window(record: SelectedAttention) -> TiledAttention | None:
    """Returns the branch of the newest keys."""
    if record.window_size is None:
        return None
    newest = (record.window_size - 1, 0)
    return as_tiled_attention(record, q_positions=record.q_positions, causal=True, sliding_window=newest)


def as_tiled_attention(record: SelectedAttention, **fields: Any) -> TiledAttention:
    """Returns attention of the queries to the keys, or to what `fields` says instead."""
    shared: dict[str, Any] = {
        "query": record.query,
        "key": record.key,
        "value": record.value,
        "softmax_scale": record.softmax_scale,
        "q_segment_ids": record.q_segment_ids,
        "kv_segment_ids": record.kv_segment_ids,
    }
    return TiledAttention(**{**shared, **fields})


def with_keys_in_rows(record: SelectedAttention) -> SelectedAttention:
    """Returns the record with its pages copied to rows of keys."""
    if record.block_tables is None:
        return record
    pages, size = record.key.shape[:2]
    present = jnp.repeat(has_page(record.block_tables, pages), size, axis=1)
    return dataclasses.replace(
        record,
        key=rows_of_pages(record.key, record.block_tables),
        value=rows_of_pages(record.value, record.block_tables),
        kv_segment_ids=jnp.where(present, 0, -1),
        block_tables=None,
    )


def sum_of_gated_branches(record: SelectedAttention, branches: Mapping[str, BranchResiduals]) -> jax.Array:
    """Returns the sum of the branches, each times its gate, [B, T, H, Dv] in the query's dtype."""
    dtype = jnp.promote_types(record.query.dtype, jnp.float32)
    total: Any = 0
    for name, branch in branches.items():
        gate, output = getattr(record, GATE_FIELD_BY_BRANCH[name]), branch.output.astype(dtype)
        total = total + (output if gate is None else gate[..., None].astype(dtype) * output)
    return total.astype(record.query.dtype)
