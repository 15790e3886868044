"""The chunks of a record: `TOKENS_PER_STORED_STATE` tokens each, from one stored state to the next."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv, is_symbolic
from ejkernel.families.selective_scan import TOKENS_PER_STORED_STATE, SelectiveScan, accumulator, packed_scan
from ejkernel.families.selective_scan.packed_scan import IntervalTable
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel_xla.selective_scan.kernels.chunk import ChunkTokens


class ChunkSlice(NamedTuple):
    """One chunk.

    Attributes:
        start: First token of its slice: a last chunk that would end past the array is moved back.
        belongs_to_chunk: Which tokens of the slice are the chunk's, bool [1, L, 1]: the others are the chunk's before,
            or another sequence's.
        sequence: Whose it is, where sequences are packed; N for none.
        starts_sequence: Whether the sequence begins with it.
        ends_sequence: Whether the sequence ends with it.
    """

    start: jax.Array
    belongs_to_chunk: jax.Array
    sequence: jax.Array | None = None
    starts_sequence: jax.Array | None = None
    ends_sequence: jax.Array | None = None


TOKEN_FIELDS = ("x", "step", "write", "read")
"""Fields with something for every token."""


def fill_last_chunk(record: SelectiveScan) -> SelectiveScan:
    """Returns the record with steps of 0 up to a whole chunk, if the count of its tokens is symbolic: it may be smaller
    than a chunk, which cannot then be moved back.
    """
    tokens = record.x.shape[1]
    if not is_symbolic(tokens):
        return record
    missing = cdiv(tokens, TOKENS_PER_STORED_STATE) * TOKENS_PER_STORED_STATE - tokens
    return dataclasses.replace(record, **{name: pad_axis(getattr(record, name), 1, missing) for name in TOKEN_FIELDS})


def num_chunks(record: SelectiveScan) -> int:
    """Returns number of chunks; of packed sequences the most that there can be."""
    tokens = record.x.shape[1]
    if record.cu_seqlens is None:
        return cdiv(tokens, TOKENS_PER_STORED_STATE)
    return packed_scan.max_num_intervals(tokens, record.cu_seqlens.shape[0] - 1)


def intervals(record: SelectiveScan) -> IntervalTable | None:
    """Returns the intervals of packed sequences; None without packing."""
    return None if record.cu_seqlens is None else packed_scan.make_interval_table(record.cu_seqlens, record.x.shape[1])


def chunk_at(record: SelectiveScan, packed: IntervalTable | None, n: jax.Array) -> ChunkSlice:
    """Returns the nth chunk."""
    tokens = record.x.shape[1]
    length = TOKENS_PER_STORED_STATE if is_symbolic(tokens) else min(TOKENS_PER_STORED_STATE, tokens)
    at = None if packed is None else IntervalTable(*(lax.dynamic_index_in_dim(x, n, keepdims=False) for x in packed))
    first = n * TOKENS_PER_STORED_STATE if at is None else at.begin
    start = jnp.minimum(first, tokens - length)
    token = start + jnp.arange(length, dtype=jnp.int32)
    if at is None or record.cu_seqlens is None:
        return ChunkSlice(start, (token >= first)[None, :, None])
    used = at.sequence < record.cu_seqlens.shape[0] - 1
    fresh = used & (token >= first) & (token < at.end)
    return ChunkSlice(start, fresh[None, :, None], at.sequence, at.starts_sequence & used, at.ends_sequence & used)


def cut(x: jax.Array, at: ChunkSlice) -> jax.Array:
    """Returns a chunk's part of [B, T, ...], 0 for tokens that are not its own: what those hold, NaN as well, is not
    read.
    """
    return jnp.where(
        at.belongs_to_chunk, lax.dynamic_slice_in_dim(x, at.start, at.belongs_to_chunk.shape[1], axis=1), 0
    )


def store_chunk_tokens(x: jax.Array, at: ChunkSlice, part: jax.Array) -> jax.Array:
    """Returns [B, T, ...] with the fresh tokens of a chunk replaced."""
    merged = jnp.where(
        at.belongs_to_chunk, part.astype(x.dtype), lax.dynamic_slice_in_dim(x, at.start, part.shape[1], axis=1)
    )
    return lax.dynamic_update_slice_in_dim(x, merged, at.start, axis=1)


def load(record: SelectiveScan, at: ChunkSlice) -> ChunkTokens:
    """Returns a chunk's tokens. Those that are not its own have a step of 0, which leaves the state as it is."""
    dtype = accumulator(record)
    parts = (cut(record.x, at), cut(record.step, at), cut(record.write, at), cut(record.read, at))
    return ChunkTokens(*(jnp.moveaxis(part, 1, 0).astype(dtype) for part in parts))


def state_before_chunk(at: ChunkSlice, state: jax.Array, states: jax.Array) -> jax.Array:
    """Returns the state [B, E, I] before a chunk: of a packed sequence's first its own of [N, E, I], else the one
    before.

    In reverse, `states` are the cotangents of the final states, and a sequence is entered with its last chunk.
    """
    if at.sequence is None or at.starts_sequence is None:
        return state
    initial = lax.dynamic_index_in_dim(states, jnp.minimum(at.sequence, states.shape[0] - 1), keepdims=True)
    # A choice and no product with 0: nothing of another sequence's state is left, NaN and infinities among it.
    return jnp.where(at.starts_sequence, initial, state)


def store_final_states(at: ChunkSlice, state: jax.Array, states: jax.Array) -> jax.Array:
    """Returns the states [N, E, I] after packed sequences, with that of a chunk's; its last one is written last."""
    if at.sequence is None:
        return state
    return states.at[at.sequence].set(state[0], mode="drop")
