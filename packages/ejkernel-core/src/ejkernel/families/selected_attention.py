"""The selected attention family: attention of every query to blocks of keys that it lists, and to what summarises them.

Three branches share the query, each of them softmax attention as `ejkernel.families.tiled_attention` defines it:

    selected     the keys of the blocks that the query lists, or that are selected for it, up to its own
    compressed   one key and one value a block, for the blocks that end no later than the query's own key
    window       the newest `window_size` keys, the query's own among them

    o_i = g_slc_i * selected_i + g_cmp_i * compressed_i + g_swa_i * window_i

A branch whose fields are absent is left out, an absent gate is 1. The selected branch is always there.

Without `block_indices`, the blocks of a query are its own and those before it that weigh most in the compressed branch,
summed over the query heads of a KV head; of two that weigh the same the later. Without that branch nothing weighs
anything, and only its own is left. What is selected has no gradient.

Source: native sparse attention, Yuan et al. 2025, arXiv:2502.11089.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family, Isolation
from ejkernel.planning import block_selection
from ejkernel.planning.block_selection import BlockPlaces
from ejkernel.planning.isolation import has_segments, isolate_selected, isolate_selected_pullback
from ejkernel.planning.requests import segment_owners


@arguments
class SelectedAttention:
    """Canonical input of one call. B batch, T queries, S keys, H query heads, Hk KV heads, M blocks, N listed blocks.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query.
        value: [B, S, Hk, Dv], same dtype as query.
        block_indices: [B, T, Hk, N] int32, the blocks that a query reads; -1 is none. No row lists a block twice. None
            where they are selected, which takes the compressed branch.
        softmax_scale: Factor on the raw scores.
        block_size: Keys a block.
        selected_blocks: Blocks that are selected for a query, its own among them, where block_indices is None.
        block_starts: [M] int32 in ascending order, the first key of every block; None where block c starts at
            `c * block_size`. Of a block that reaches beyond the next one's start, the keys there are no query's that
            lists it: they belong to another sequence.
        compressed_key: [B, M, Hk, D], same dtype as query; with compressed_value: the compressed branch.
        compressed_value: [B, M, Hk, Dv], likewise.
        compressed_segment_ids: [B, M] int32, of the compressed keys.
        q_segment_ids: [B, T] int32; with kv_segment_ids: equal ids >= 0 attend, < 0 is padding.
        kv_segment_ids: [B, S] int32.
        q_positions: [B|1, T] int32, index of each query's own key; None where it is the query's index.
        g_slc: [B, T, H] floating, gate of the selected branch.
        g_cmp: [B, T, H] floating, gate of the compressed branch.
        g_swa: [B, T, H] floating, gate of the window.
        window_size: Keys of the window; None leaves that branch out.
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


@arguments
class Branch:
    """What a branch leaves for the backward pass.

    Attributes:
        output: [B, T, H, Dv] in the query's dtype, before the gate.
        lse: [B, H, T] float32, log of the softmax denominator; -inf for empty rows.
    """

    output: jax.Array
    lse: jax.Array


@arguments
class SelectedResiduals:
    """What a forward pass leaves for the backward pass.

    Attributes:
        selected: The selected branch.
        compressed: The compressed branch; None where it was left out.
        window: Likewise.
        block_indices: [B, T, Hk, N] int32, the blocks that were selected; None where they were given.
    """

    selected: Branch
    compressed: Branch | None = None
    window: Branch | None = None
    block_indices: jax.Array | None = None


GATES = {"selected": "g_slc", "compressed": "g_cmp", "window": "g_swa"}
"""The field that gates each branch."""


def blocks(record: SelectedAttention) -> int:
    """How many blocks there are to list."""
    if record.block_starts is not None:
        return record.block_starts.shape[0]
    if record.compressed_key is not None:
        return record.compressed_key.shape[1]
    return -(-record.key.shape[1] // record.block_size)


def slots(record: SelectedAttention) -> int:
    """How many blocks a query has room for."""
    return max(1, record.selected_blocks) if record.block_indices is None else record.block_indices.shape[3]


def starts(record: SelectedAttention) -> jax.Array:
    """The first key of every block, int32 [M]."""
    given = record.block_starts
    return jnp.arange(blocks(record), dtype=jnp.int32) * record.block_size if given is None else given


def query_positions(record: SelectedAttention) -> jax.Array:
    """The index of the key at each query's position, int32 [B|1, T]."""
    given = record.q_positions
    return jnp.arange(record.query.shape[1], dtype=jnp.int32)[None] if given is None else given


def places(record: SelectedAttention) -> BlockPlaces:
    """Where the blocks lie, for selecting them."""
    return BlockPlaces(
        starts=starts(record),
        size=record.block_size,
        query_positions=query_positions(record),
        q_ids=record.q_segment_ids,
        block_ids=record.compressed_segment_ids,
    )


def select(record: SelectedAttention) -> jax.Array:
    """The blocks that each query of a record reads, [B, T, Hk, N] int32, in plain jnp: those given, or the selected."""
    if record.block_indices is not None:
        return record.block_indices
    keys, scale = record.compressed_key, record.softmax_scale
    if keys is None:  # nothing weighs anything
        keys = record.key[:, :0]
    return block_selection.select(record.query, keys, scale, slots(record), places(record))


def compressed(record: SelectedAttention) -> TiledAttention | None:
    """The compressed branch: a block's position is that of the last key it has room for."""
    if record.compressed_key is None or record.compressed_value is None:
        return None
    return _dense(
        record,
        key=record.compressed_key,
        value=record.compressed_value,
        kv_segment_ids=record.compressed_segment_ids,
        q_positions=query_positions(record),
        kv_positions=(starts(record) + (record.block_size - 1))[None],
        causal=True,
    )


def window(record: SelectedAttention) -> TiledAttention | None:
    """The branch of the newest keys."""
    if record.window_size is None:
        return None
    newest = (record.window_size - 1, 0)
    return _dense(record, q_positions=record.q_positions, causal=True, sliding_window=newest)


def _dense(record: SelectedAttention, **fields: Any) -> TiledAttention:
    """Attention of the queries to the keys, or to what `fields` says instead."""
    shared: dict[str, Any] = {
        "query": record.query,
        "key": record.key,
        "value": record.value,
        "softmax_scale": record.softmax_scale,
        "q_segment_ids": record.q_segment_ids,
        "kv_segment_ids": record.kv_segment_ids,
    }
    return TiledAttention(**{**shared, **fields})


def gated(record: SelectedAttention, branches: Mapping[str, Branch]) -> jax.Array:
    """The sum of the branches, each times its gate, [B, T, H, Dv] in the query's dtype."""
    dtype = jnp.promote_types(record.query.dtype, jnp.float32)
    total: Any = 0
    for name, branch in branches.items():
        gate, output = getattr(record, GATES[name]), branch.output.astype(dtype)
        total = total + (output if gate is None else gate[..., None].astype(dtype) * output)
    return total.astype(record.query.dtype)


def reference(record: SelectedAttention) -> tuple[jax.Array, SelectedResiduals]:
    """The family's meaning in plain jnp, with a mask of every query and key; float64 if query is, else float32."""
    indices = select(record)
    found: dict[str, TiledAttention | None] = {
        "selected": _masked(record, indices),
        "compressed": compressed(record),
        "window": window(record),
    }
    branches: dict[str, Branch] = {}
    for name, one in found.items():
        if one is not None:
            output, residuals = tiled_attention.reference(one)
            branches[name] = Branch(output=output, lse=residuals.lse)
    selected = indices if record.block_indices is None else None
    return gated(record, branches), SelectedResiduals(**branches, block_indices=selected)


def _masked(record: SelectedAttention, indices: jax.Array) -> TiledAttention:
    """The selected branch as attention under a mask."""
    key = jnp.arange(record.key.shape[1], dtype=jnp.int32)
    first = starts(record)[jnp.maximum(indices, 0)][..., None]
    listed = (indices[..., None] >= 0) & (key >= first) & (key < first + record.block_size)
    allowed = listed.any(axis=3) & (key <= query_positions(record)[:, :, None, None])
    group = record.query.shape[2] // record.key.shape[2]
    return _dense(record, mask=jnp.repeat(allowed, group, axis=2).swapaxes(1, 2))


def localise(record: SelectedAttention, offsets: Mapping[str, jax.Array]) -> SelectedAttention:
    """Makes one shard's record mean its part of the global call: the keys are all there, the queries are some."""
    queries = offsets.get("t")
    if queries is None or record.q_positions is not None:
        return record
    return dataclasses.replace(record, q_positions=query_positions(record) + queries)


def requests(record: SelectedAttention) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the segments of rows, those of compressed keys among them, or the rows."""
    ids = [np.asarray(x) for x in (record.q_segment_ids, record.kv_segment_ids) if x is not None]
    if not ids:
        return ({"b": np.arange(record.query.shape[0])},)
    if record.compressed_segment_ids is not None:
        ids.append(np.asarray(record.compressed_segment_ids))
    owners = segment_owners(np.concatenate(ids, axis=1))
    parts = np.split(owners, np.cumsum([x.shape[1] for x in ids])[:-1], axis=1)
    return (dict(zip(("b t", "b s", "b m"), parts, strict=False)),)


FAMILY = Family(
    name="selected_attention",
    record=SelectedAttention,
    differentiable=("query", "key", "value", "compressed_key", "compressed_value", "g_slc", "g_cmp", "g_swa"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes={
        "query": "b t h d",
        "key": "b s g d",
        "value": "b s g v",
        "block_indices": "b t g k",
        "block_starts": "m",
        "compressed_key": "b m g d",
        "compressed_value": "b m g v",
        "compressed_segment_ids": "b m",
        "q_segment_ids": "b t",
        "kv_segment_ids": "b s",
        "q_positions": "b t",
        "g_slc": "b t h",
        "g_cmp": "b t h",
        "g_swa": "b t h",
        "output": "b t h v",
    },
    shardable="bthg",
    aligned=(("h", "g"),),
    localise=localise,
    reference=reference,
    requests=requests,
    isolate=Isolation(record=isolate_selected, pullback=isolate_selected_pullback, concerns=has_segments),
)
