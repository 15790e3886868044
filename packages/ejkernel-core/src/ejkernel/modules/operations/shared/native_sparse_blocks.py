"""Blocks of native sparse attention: the positions of blocks and queries, block means, and the caller's block lists."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.segment_pooling import chunk_ranges
from ejkernel.modules.operations.shared.key_ranges import find_sequences_of_queries
from ejkernel.ops.invariant_rows import compute_rows
from ejkernel.planning import packing


class KeyBlocks(NamedTuple):
    """Blocks of `size` keys, cut from the first key of every sequence on. B rows, S keys, M blocks, N sequences.

    Attributes:
        size: Keys per block; the last one of a sequence may have fewer.
        ids: [B, S] int32, sequence of every key, < 0 for padding; None where every row is one sequence.
        key_ranges: [M, 2] int32, the first key of every block and the one after its last, for packed sequences.
        first_blocks: [N] int32, the first block of every packed sequence.
    """

    size: int
    ids: jax.Array | None
    key_ranges: jax.Array | None
    first_blocks: jax.Array | None


def make_key_blocks(shape: tuple[int, int], size: int, cu_seqlens: jax.Array | None, *, is_packed: bool) -> KeyBlocks:
    """Returns the blocks of rows of keys.

    Args:
        shape: B and S.
        size: Keys per block.
        cu_seqlens: Cumulative lengths of keys: [N + 1] of sequences packed in one row, or [B + 1] of rows that each
            hold one sequence and padding; None where every row is one sequence.
        is_packed: Whether the sequences are packed in one row.
    """
    _, keys = shape
    if cu_seqlens is None:
        return KeyBlocks(size, None, None, None)
    if not is_packed:
        return KeyBlocks(size, packing.padded_ids(cu_seqlens, keys)[0].astype(jnp.int32), None, None)
    bounds = jnp.clip(cu_seqlens.astype(jnp.int32), 0, keys)
    blocks = cdiv(jnp.diff(bounds), size)
    first_blocks = jnp.cumsum(blocks, dtype=jnp.int32) - blocks
    return KeyBlocks(size, packing.packed_ids(bounds, keys)[0], chunk_ranges(bounds, size, keys), first_blocks)


class QueryPlaces(NamedTuple):
    """Where queries lie among the keys and blocks. B rows, T queries.

    Attributes:
        ids: [B, T] int32, sequence of every query, < 0 for padding and for queries before the first key of their
            sequence; None where every row is one sequence.
        keys: [B|1, T] int32, index of the key at each query's position.
        current_blocks: [B|1, T] int32, the block of that key, numbered in its sequence; below 0 where there is none.
        first_blocks: [B|1, T] int32, the first block of each query's sequence.
    """

    ids: jax.Array | None
    keys: jax.Array
    current_blocks: jax.Array
    first_blocks: jax.Array


def place_queries(
    blocks: KeyBlocks, sizes: tuple[int, int, int], cu_seqlens: tuple[jax.Array, jax.Array] | None
) -> QueryPlaces:
    """Returns the places of queries, the last of which has the position of its sequence's last key.

    Args:
        blocks: The blocks of the keys.
        sizes: B, T and S.
        cu_seqlens: Cumulative lengths of queries and of keys; None where every row is one sequence.
    """
    _, queries, keys = sizes
    if cu_seqlens is None:
        position = jnp.arange(queries, dtype=jnp.int32)[None] + (keys - queries)
        return QueryPlaces(None, position, position // blocks.size, jnp.zeros((1, 1), jnp.int32))
    sequences = find_sequences_of_queries(sizes, cu_seqlens)
    ids = jnp.where(sequences.positions >= 0, sequences.ids, -1)
    current_blocks = jnp.where(ids >= 0, sequences.positions // blocks.size, -1)
    first_blocks = jnp.zeros((1, 1), jnp.int32)
    if blocks.first_blocks is not None:
        first_blocks = blocks.first_blocks[jnp.maximum(sequences.ids, 0)]
    return QueryPlaces(ids, sequences.first_keys + sequences.positions, current_blocks, first_blocks)


def block_means(blocks: KeyBlocks, x: jax.Array) -> jax.Array:
    """Returns the mean over the keys of every block: [B, S, Hk, n] -> [B, M, Hk, n] in the same dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if blocks.ids is not None:
        x = jnp.where((blocks.ids >= 0)[..., None, None], x, 0)
    rows, keys, *rest = x.shape
    if blocks.key_ranges is not None:
        first, end = blocks.key_ranges[:, 0], blocks.key_ranges[:, 1]
        key = first[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)
        inside = (key < end[:, None])[..., None, None]
        parts = jnp.where(inside, x[0, jnp.minimum(key, keys - 1)], 0)[None]
        counts = (end - first)[None]
    else:
        count = cdiv(keys, blocks.size)
        x = jnp.pad(x, ((0, 0), (0, count * blocks.size - keys), (0, 0), (0, 0)))
        parts = x.reshape(rows, count, blocks.size, *rest)
        if blocks.ids is None:
            counts = jnp.minimum(keys - jnp.arange(count, dtype=jnp.int32) * blocks.size, blocks.size)[None]
        else:
            counts = jnp.sum(_ids_by_block(blocks) >= 0, axis=2, dtype=jnp.int32)
    counts = jnp.broadcast_to(jnp.maximum(counts, 1).astype(wide), parts.shape[:2])
    return compute_rows(_mean_of_parts, (parts, counts), axes=2)


def _mean_of_parts(parts: jax.Array, counts: jax.Array) -> jax.Array:
    return (jnp.sum(parts, axis=2, dtype=counts.dtype) / counts[..., None, None]).astype(parts.dtype)


def complete_block_ids(blocks: KeyBlocks) -> jax.Array | None:
    """Returns the sequence of every block, [B, M] int32, -1 for blocks that have fewer keys than `size`; None where
    rows are sequences.
    """
    if blocks.ids is None:
        return None
    if blocks.key_ranges is None:
        return jnp.min(_ids_by_block(blocks), axis=2)
    first, end = blocks.key_ranges[:, 0], blocks.key_ranges[:, 1]
    return jnp.where(end - first == blocks.size, blocks.ids[0, jnp.minimum(first, blocks.ids.shape[1] - 1)], -1)[None]


def _ids_by_block(blocks: KeyBlocks) -> jax.Array:
    """Returns the ids of the keys of every block, [B, M, size], for rows that are not packed."""
    assert blocks.ids is not None  # the callers have ids
    rows, keys = blocks.ids.shape
    count = cdiv(keys, blocks.size)
    ids = jnp.pad(blocks.ids, ((0, 0), (0, count * blocks.size - keys)), constant_values=-1)
    return ids.reshape(rows, count, blocks.size)


def row_block_indices(places: QueryPlaces, indices: jax.Array, counts: int | jax.Array) -> jax.Array:
    """Returns the caller's blocks as indices into the row's blocks, each once; -1 for those that a query cannot read.

    Args:
        places: Where the queries lie.
        indices: [B, T, Hk, K] int, blocks of each query's own sequence; any other value is an empty slot.
        counts: How many slots count, for all or as [B, T, Hk].
    """
    slots = jnp.arange(indices.shape[3], dtype=jnp.int32)
    indices = indices.astype(jnp.int32)
    current, first = (x[:, :, None, None] for x in (places.current_blocks, places.first_blocks))
    count = counts if isinstance(counts, int) else counts.astype(jnp.int32)[..., None]
    real = (indices >= 0) & (indices <= current) & (slots < count)
    indices = jnp.where(real, indices, -1)
    earlier = slots[:, None] > slots
    repeated = ((indices[..., :, None] == indices[..., None, :]) & earlier).any(axis=-1)
    return jnp.where(real & ~repeated, indices + first, -1)
