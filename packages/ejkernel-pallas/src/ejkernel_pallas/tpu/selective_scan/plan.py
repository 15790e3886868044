"""Arranges a record's arrays as the kernels read them: chunks of 64 tokens, B and C of a chunk with tokens in lanes.

    [B, T, I]   x, dt  ──► blocks [64, 1024 n]                        n groups of 1024 channels
    [B, T, E]   B, C   ──► [B, chunks, E, 64]                          tokens in lanes
    [N, I, E]   states ──► [N, E, I]                                   the layout of XLA on TPUs: no copy

Packed sequences begin a chunk each: their tokens are gathered so that no chunk has tokens of two of them. Chunks are
then the intervals of `ejkernel.families.selective_scan.packed_scan`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan, packed_scan
from ejkernel_pallas.tpu.mosaic import packed_chunks
from ejkernel_pallas.tpu.selective_scan.config import TpuScan
from ejkernel_pallas.tpu.selective_scan.spec import (
    CHUNK_TOKENS,
    ScanSpec,
    UpdateSpec,
    make_spec,
    make_update_spec,
    tokens_per_update_chunk,
)

MAX_CHUNKS = 2**17
"""The largest number of chunks: their table takes half of the 1 MiB of scalar memory."""
IS_LAST_CHUNK_FLAG, IS_FIRST_CHUNK_FLAG, HAS_TOKENS_FLAG, ENTRY_SEQUENCE_STRIDE = 1, 2, 4, 8
"""Entries of the chunk table are `ENTRY_SEQUENCE_STRIDE * sequence` plus these flags: whether the chunk is the last of
its sequence, the first of its sequence, and whether it has tokens.
"""


ENTRY_SLOT_STRIDE = 8
"""Entries of `slot_table` are this times the slot of the chunk's sequence, plus three flags."""


class TokenPositions(NamedTuple):
    """The positions of packed tokens in the kernels' arrays.

    Attributes:
        token_at_position: int32 [T'], the token at each position; T where a position holds no token.
        position_of_token: int32 [T], the position of each token; T' for padding tokens.
    """

    token_at_position: jax.Array
    position_of_token: jax.Array


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """The chunks of a record, and where they have its tokens.

    Attributes:
        spec: Constants of the kernels.
        batch_size: B, the number of rows.
        chunk_table: int32 [B * chunks], see `ENTRY_SEQUENCE_STRIDE`; without packing, each row is a sequence.
        token_positions: The positions of packed tokens; None without packing.
    """

    spec: ScanSpec
    batch_size: int
    chunk_table: jax.Array
    token_positions: TokenPositions | None

    def gather_to_chunks(self, x: jax.Array) -> jax.Array:
        """Converts [B, T, ...] of packed sequences to [B, T', ...], with zeros where there is no token. Arrays of a
        record without packing are returned unchanged.
        """
        if self.token_positions is None:
            return x
        return jnp.take(x, self.token_positions.token_at_position, axis=1, mode="fill", fill_value=0)

    def gather_from_chunks(self, x: jax.Array) -> jax.Array:
        """Converts [B, T', ...] back to [B, T, ...]."""
        if self.token_positions is None:
            return x
        return jnp.take(x, self.token_positions.position_of_token, axis=1, mode="fill", fill_value=0)

    def arrange_write_or_read(self, x: jax.Array) -> jax.Array:
        """Converts B or C [B, T, E] to float32 [B, chunks, E, 64]."""
        x = self.gather_to_chunks(x)
        x = jnp.pad(x, ((0, 0), (0, self.spec.chunks_per_row * CHUNK_TOKENS - x.shape[1]), (0, 0)))
        x = x.reshape(self.batch_size, self.spec.chunks_per_row, CHUNK_TOKENS, self.spec.state_size)
        return jnp.swapaxes(x, 2, 3).astype(jnp.float32)


def num_chunks_of_call(record: SelectiveScan) -> int:
    """Returns the number of chunks of a call."""
    rows, tokens, _ = record.x.shape
    if record.cu_seqlens is None:
        return rows * cdiv(tokens, CHUNK_TOKENS)
    return packed_scan.max_num_intervals(tokens, record.cu_seqlens.shape[0] - 1)


def num_slot_update_chunks(record: SelectiveScan) -> int:
    """Returns the number of chunks of a call whose states are in slots."""
    sequences = 0 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return sequences + record.x.shape[1] // tokens_per_update_chunk(record)


def make_plan(record: SelectiveScan, config: TpuScan) -> ScanPlan:
    """Returns the chunks of a record."""
    rows, num_chunks = record.x.shape[0], num_chunks_of_call(record)
    spec = make_spec(record, config, num_chunks // rows)
    if record.cu_seqlens is not None:
        return _make_packed_plan(record, record.cu_seqlens, spec)
    row, chunk = jnp.divmod(jnp.arange(num_chunks, dtype=jnp.int32), spec.chunks_per_row)
    end_flags = IS_FIRST_CHUNK_FLAG * (chunk == 0) + IS_LAST_CHUNK_FLAG * (chunk == spec.chunks_per_row - 1)
    return ScanPlan(spec, rows, (ENTRY_SEQUENCE_STRIDE * row + HAS_TOKENS_FLAG + end_flags).astype(jnp.int32), None)


def _make_packed_plan(record: SelectiveScan, cu_seqlens: jax.Array, spec: ScanSpec) -> ScanPlan:
    """Returns the chunks of packed sequences."""
    tokens, last_sequence = record.x.shape[1], cu_seqlens.shape[0] - 2
    intervals = packed_scan.make_interval_table(cu_seqlens, tokens)
    has_tokens = intervals.sequence <= last_sequence
    # Unused chunks are assigned to the last sequence with tokens; kernels leave its states unchanged there.
    sequence = jnp.where(has_tokens, intervals.sequence, jnp.max(jnp.where(has_tokens, intervals.sequence, 0)))
    flags = jnp.where(
        has_tokens,
        HAS_TOKENS_FLAG
        + IS_FIRST_CHUNK_FLAG * intervals.starts_sequence
        + IS_LAST_CHUNK_FLAG * intervals.ends_sequence,
        0,
    )
    token = intervals.begin[:, None] + jnp.arange(CHUNK_TOKENS, dtype=jnp.int32)
    is_token = has_tokens[:, None] & (token < intervals.end[:, None])
    token_at_position = jnp.where(is_token, token, tokens).reshape(-1)
    positions = jnp.arange(token_at_position.shape[0], dtype=jnp.int32)
    position_of_token = (
        jnp.full(tokens, token_at_position.shape[0], jnp.int32).at[token_at_position].set(positions, mode="drop")
    )
    return ScanPlan(
        spec,
        1,
        (ENTRY_SEQUENCE_STRIDE * sequence + flags).astype(jnp.int32),
        TokenPositions(token_at_position, position_of_token),
    )


@dataclasses.dataclass(frozen=True)
class SlotUpdatePlan:
    """The chunks of a record whose states are in slots: [1, T, I] is [chunks, octets, tokens of an octet, I].

    Attributes:
        spec: Constants of the kernel.
        token_positions: The positions of packed tokens.
        chunk_table: int32 [chunks], as `slot_table` returns it.
    """

    spec: UpdateSpec
    token_positions: packed_chunks.ChunkPositions
    chunk_table: jax.Array

    def gather_to_chunks(self, x: jax.Array) -> jax.Array:
        """Converts [1, T, ...] to whole chunks, with zeros where there is no token."""
        x = jnp.take(x[0], self.token_positions.token_at_position, axis=0, mode="fill", fill_value=0)
        return x.reshape(-1, self.spec.octets_per_chunk, self.spec.tokens_per_octet, *x.shape[1:])

    def gather_from_chunks(self, x: jax.Array) -> jax.Array:
        """Converts whole chunks back to [1, T, ...]."""
        return jnp.take(
            x.reshape(-1, *x.shape[3:]), self.token_positions.position_of_token, axis=0, mode="fill", fill_value=0
        )[None]

    def arrange_write_and_read(self, write: jax.Array, read: jax.Array) -> jax.Array:
        """Returns B and C as columns, float32 [chunks, octets, E, 2 * tokens of an octet]."""
        both = jnp.concatenate([self.gather_to_chunks(write), self.gather_to_chunks(read)], axis=2)
        return jnp.swapaxes(both, 2, 3).astype(jnp.float32)


def make_slot_update_plan(
    record: SelectiveScan, cu_seqlens: jax.Array, slot_of_sequence: jax.Array, num_slots: int, config: TpuScan
) -> SlotUpdatePlan:
    """Returns the chunks of packed sequences whose states are in slots.

    Args:
        record: The record.
        cu_seqlens: int [N + 1], the first token of each sequence.
        slot_of_sequence: int [N], the slot of each sequence; out of range for a sequence without a slot.
        num_slots: The number of slots.
        config: Tiles.
    """
    spec = make_update_spec(record, config)
    token_positions = packed_chunks.make_chunk_positions(
        cu_seqlens.astype(jnp.int32), record.x.shape[1], spec.chunk_tokens
    )
    table = packed_chunks.slot_table(token_positions, slot_of_sequence, num_slots)
    # JAX's rule for `vmap` drops a traced grid that is not batched where tables are: it depends on them.
    return SlotUpdatePlan(
        spec, token_positions._replace(num_used_chunks=token_positions.num_used_chunks + 0 * table[0]), table
    )
