"""A record as the kernels read it: chunks of 64 tokens, and B and C of a chunk with tokens in lanes.

    [B, T, I]   x, dt  ──► blocks [64, 1024 n]                        n groups of 1024 channels
    [B, T, E]   B, C   ──► [B, chunks, E, 64]                          tokens in lanes
    [N, I, E]   states ──► [N, E, I]                                   as they lie in a TPU's memory: no copy

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
    CHUNK,
    ScanSpec,
    UpdateSpec,
    make_spec,
    make_update_spec,
    update_chunk,
)

LOG2E = 1.4426950408889634
MAX_CHUNKS = 2**17
"""Chunks whose table scalar memory holds: half of its 1 MiB."""
LAST, FIRST, REAL, SEQUENCE_FACTOR = 1, 2, 4, 8
"""Entries of the table are `SEQUENCE_FACTOR * owner` plus these: whether a chunk is its sequence's last, its first, and
any's.
"""


SLOT_FACTOR = 8
"""Entries of the table of chunks whose states are in slots are this times the slot, plus the flags of `slot_table`."""


class Places(NamedTuple):
    """The positions of packed tokens in the kernels' arrays.

    Attributes:
        source: int32 [T'], the token at each place; T where there is none.
        target: int32 [T], the place of each token; T' for padding tokens.
    """

    source: jax.Array
    target: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A record's chunks.

    Attributes:
        spec: Constants of the kernels.
        rows: B.
        table: int32 [B * chunks], see `SEQUENCE_FACTOR`; the owner is a row or a packed sequence.
        places: The positions of packed tokens; None without packing.
    """

    spec: ScanSpec
    rows: int
    table: jax.Array
    places: Places | None

    def align(self, x: jax.Array) -> jax.Array:
        """Converts [B, T, ...] of packed sequences to [B, T', ...], with zeros where there is no token. Arrays of a
        record without packing are returned unchanged.
        """
        if self.places is None:
            return x
        return jnp.take(x, self.places.source, axis=1, mode="fill", fill_value=0)

    def unalign(self, x: jax.Array) -> jax.Array:
        """Converts [B, T', ...] back to [B, T, ...]."""
        if self.places is None:
            return x
        return jnp.take(x, self.places.target, axis=1, mode="fill", fill_value=0)

    def columns(self, x: jax.Array) -> jax.Array:
        """Converts B or C [B, T, E] to float32 [B, chunks, E, 64]."""
        x = self.align(x)
        x = jnp.pad(x, ((0, 0), (0, self.spec.chunks * CHUNK - x.shape[1]), (0, 0)))
        x = x.reshape(self.rows, self.spec.chunks, CHUNK, self.spec.size)
        return jnp.swapaxes(x, 2, 3).astype(jnp.float32)


def table_size(record: SelectiveScan) -> int:
    """Returns the number of chunks of a call."""
    rows, tokens, _ = record.x.shape
    if record.cu_seqlens is None:
        return rows * cdiv(tokens, CHUNK)
    return packed_scan.interval_count(tokens, record.cu_seqlens.shape[0] - 1)


def update_table_size(record: SelectiveScan) -> int:
    """Returns the number of chunks of a call whose states are in slots."""
    sequences = 0 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return sequences + record.x.shape[1] // update_chunk(record)


def make_plan(record: SelectiveScan, config: TpuScan) -> Plan:
    """Returns the chunks of a record."""
    rows, count = record.x.shape[0], table_size(record)
    spec = make_spec(record, config, count // rows)
    if record.cu_seqlens is not None:
        return _packed_plan(record, record.cu_seqlens, spec)
    row, chunk = jnp.divmod(jnp.arange(count, dtype=jnp.int32), spec.chunks)
    ends = FIRST * (chunk == 0) + LAST * (chunk == spec.chunks - 1)
    return Plan(spec, rows, (SEQUENCE_FACTOR * row + REAL + ends).astype(jnp.int32), None)


def _packed_plan(record: SelectiveScan, cu_seqlens: jax.Array, spec: ScanSpec) -> Plan:
    """Returns the chunks of packed sequences."""
    tokens, last = record.x.shape[1], cu_seqlens.shape[0] - 2
    at = packed_scan.packed_intervals(cu_seqlens, tokens)
    real = at.sequence <= last
    # Chunks that no sequence needs are those of the last one with tokens, whose states stay where they are.
    owner = jnp.where(real, at.sequence, jnp.max(jnp.where(real, at.sequence, 0)))
    flags = jnp.where(real, REAL + FIRST * at.opens + LAST * at.closes, 0)
    token = at.begin[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
    inside = real[:, None] & (token < at.end[:, None])
    source = jnp.where(inside, token, tokens).reshape(-1)
    places = jnp.arange(source.shape[0], dtype=jnp.int32)
    target = jnp.full(tokens, source.shape[0], jnp.int32).at[source].set(places, mode="drop")
    return Plan(spec, 1, (SEQUENCE_FACTOR * owner + flags).astype(jnp.int32), Places(source, target))


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """The chunks of a record whose states are in slots: [B, T, I] is [chunks, octets, tokens of an octet, I].

    Attributes:
        spec: Constants of the kernel.
        places: The positions of tokens.
        table: int32 [chunks] of `slot_table`.
    """

    spec: UpdateSpec
    places: packed_chunks.Places
    table: jax.Array

    def align(self, x: jax.Array) -> jax.Array:
        """Converts [1, T, ...] to whole chunks, with zeros where there is no token."""
        x = jnp.take(x[0], self.places.source, axis=0, mode="fill", fill_value=0)
        return x.reshape(-1, self.spec.octets, self.spec.tokens, *x.shape[1:])

    def unalign(self, x: jax.Array) -> jax.Array:
        """Converts whole chunks back to [1, T, ...]."""
        return jnp.take(x.reshape(-1, *x.shape[3:]), self.places.target, axis=0, mode="fill", fill_value=0)[None]

    def columns(self, write: jax.Array, read: jax.Array) -> jax.Array:
        """Returns B and C as columns, float32 [chunks, octets, E, 2 * tokens of an octet]."""
        both = jnp.concatenate([self.align(write), self.align(read)], axis=2)
        return jnp.swapaxes(both, 2, 3).astype(jnp.float32)


def make_update_plan(
    record: SelectiveScan, cu_seqlens: jax.Array, indices: jax.Array, slots: int, config: TpuScan
) -> UpdatePlan:
    """Returns the chunks of packed sequences whose states are in so many slots."""
    spec = make_update_spec(record, config)
    places = packed_chunks.chunk_places(cu_seqlens.astype(jnp.int32), record.x.shape[1], spec.chunk)
    table = packed_chunks.slot_table(places, indices, slots)
    # JAX's rule for `vmap` drops a traced grid that is not batched where tables are: it depends on them.
    return UpdatePlan(spec, places._replace(used=places.used + 0 * table[0]), table)
