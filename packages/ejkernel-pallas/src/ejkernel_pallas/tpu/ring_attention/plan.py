"""How one device's keys travel, the constants of its kernels, and the tile pairs of each load of keys.

Keys travel in one of two ways. With remote copies, one kernel per device and pass sends keys on while computing with
them. With collectives, keys are sent between kernels; this supports every record.

Shards of a causal ring are two halves from both ends of the sequence. Of another device's keys, the early queries
attend the early half or nothing, and the late queries attend all or the early half: whole tiles, if tiles divide
halves. Only the keys of the device itself need a comparison, and their indices in the shard are in order. So
kernels get no positions for a causal mask; they get them for any other mask that compares positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention, axis_size
from ejkernel.families.ring_attention.record import has_functions
from ejkernel.families.ring_attention.schedule import Ring, TravellingKeys, local_record, step_record
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window
from ejkernel_pallas.tpu.interpret import is_interpreting
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.ring_attention.config import fit_blocks_to_shard
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import canonical_record
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec, TileSizes, make_spec

PairLister = Callable[[TiledAttention, TiledSpec], Any]
MAX_LOAD_PAIRS = 2**15
"""The largest number of pairs of tiles (of 512 by 512, or what divides a shard) of all loads of a call that fit the
table.
"""


def with_window_of_function(record: RingAttention) -> RingAttention:
    """Returns the record with a `mask_mod` that is a causal mask or a window of the whole sequence as one: its shards
    may then be two halves, and keys may travel by remote copies.
    """
    shards = axis_size(record.axis_name)
    if record.mask_mod is None or shards == 1:
        return record
    whole = as_tiled_attention(dataclasses.replace(record, index_origin=None))
    query, key = (
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * shards, *x.shape[2:]), x.dtype)
        for x in (record.query, record.key)
    )
    windowed = mask_function_as_window(dataclasses.replace(whole, query=query, key=key))
    if windowed.mask_mod is not None:
        return record
    left, right = causal_window_bounds(windowed)
    sides = (left, None if right == 0 else right)
    return dataclasses.replace(
        record, mask_mod=None, causal=right == 0, sliding_window=None if sides == (None, None) else sides
    )


def uses_remote_copies(record: RingAttention) -> bool:
    """Returns whether one kernel per device can compute a record: its shards are whole tiles, and a table can list
    all pairs.
    """
    shards, lengths = axis_size(record.axis_name), (record.query.shape[1], record.key.shape[1])
    # Remote copies are interpreted only in tests, which call these kernels directly.
    if shards == 1 or is_interpreting() or record.bias is not None or record.mask is not None or has_functions(record):
        return False
    if any(length % (2 * LANES if record.causal else LANES) for length in lengths):
        return False
    rows = (record.q_segment_ids, record.kv_segment_ids, record.q_positions, record.kv_positions)
    batch = max(1 if x is None else x.shape[0] for x in rows)
    blocks = fit_blocks_to_shard(record, TileSizes(512, 512, 512, 512))
    return shards * batch * cdiv(lengths[0], blocks.queries) * cdiv(lengths[1], blocks.keys) <= MAX_LOAD_PAIRS


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The constants of one device's ring computation.

    Attributes:
        record: The record of the device's own shard, with positions if kernels compare them.
        ring: The ring.
        causal_by_shard_index: Whether causal compares indices in the shard, which is correct for the keys of the device
            itself.
    """

    record: RingAttention
    ring: Ring
    causal_by_shard_index: bool

    @classmethod
    def of(cls, record: RingAttention, ring: Ring) -> Self:
        """Returns the plan for a record, rearranged into the ring's layout."""
        local = local_record(record, ring)
        causal_by_shard_index = (
            ring.striped and record.query.shape[1] % 256 == 0 and not _masks_off_diagonal_tiles(record)
        )
        if causal_window_bounds(as_tiled_attention(record)) == (None, None):
            return cls(dataclasses.replace(local, q_positions=None, kv_positions=None), ring, False)
        return cls(local if causal_by_shard_index else _add_positions(local, ring), ring, causal_by_shard_index)

    def spec(self, shard_record: TiledAttention, blocks: TileSizes, accumulates_for_keys: bool = False) -> TiledSpec:
        """Returns the constants of the kernels of every ring step."""
        return make_spec(
            shard_record, fit_blocks_to_shard(self.record, blocks), accumulates_for_keys=accumulates_for_keys
        )

    def make_shard_record(self, source: jax.Array, load: TravellingKeys) -> TiledAttention:
        """Returns the local queries and one load of keys as the record of a kernel."""
        shard_record = canonical_record(step_record(self.record, self.ring, source, load))
        return (
            dataclasses.replace(shard_record, q_positions=None, kv_positions=None)
            if self.causal_by_shard_index
            else shard_record
        )

    def tile_pairs(
        self, shard_record: TiledAttention, spec: TiledSpec, source: jax.Array, list_pairs: PairLister
    ) -> Any:
        """Returns the tile pairs of a ring step: int32 [B|1, 1, steps]."""
        if not self.causal_by_shard_index:
            return list_pairs(shard_record, spec)
        return list_pairs(self.add_shard_positions(shard_record, source), spec)[..., : self._max_pairs_per_load(spec)]

    def add_shard_positions(self, shard_record: TiledAttention, source: jax.Array) -> TiledAttention:
        """Returns a shard with the positions that `make_shard_record` leaves out where indices suffice."""
        if not self.causal_by_shard_index:
            return shard_record
        me, length = lax.axis_index(self.ring.axis_name), shard_record.query.shape[1]
        return dataclasses.replace(
            shard_record, q_positions=self.ring.indices(me, length), kv_positions=self.ring.indices(source, length)
        )

    def _max_pairs_per_load(self, spec: TiledSpec) -> int:
        """Returns the largest number of tile pairs of any load: half of all plus the rest of the diagonal, with one
        for each tile without work.
        """
        queries, keys = spec.num_queries // spec.block_q, spec.num_keys // spec.block_kv
        return queries * keys // 2 + max(queries, keys)


def _masks_off_diagonal_tiles(record: RingAttention) -> bool:
    """Returns whether tiles off the diagonal may also be masked."""
    ids = (record.q_segment_ids, record.kv_segment_ids)
    return record.mask is not None or None not in ids


def _add_positions(record: RingAttention, ring: Ring) -> RingAttention:
    """Returns the record with positions, which travel with their keys."""
    me = lax.axis_index(ring.axis_name)
    q, k = record.q_positions, record.kv_positions
    q = ring.indices(me, record.query.shape[1]) if q is None else q
    k = ring.indices(me, record.key.shape[1]) if k is None else k
    return dataclasses.replace(record, q_positions=q, kv_positions=k)


def initial_softmax_state(record: RingAttention) -> tuple[jax.Array, jax.Array]:
    """Returns the state before any key, output [B, T, H, Dv] and lse [B, H, T]. It contains the sinks, so they count
    once.
    """
    (b, t, h, _), size = record.query.shape, record.value.shape[3]
    sinks = jnp.full(h, -jnp.inf) if record.softmax_aux is None else record.softmax_aux.astype(jnp.float32)
    return jnp.zeros((b, t, h, size), jnp.float32), jnp.broadcast_to(sinks[:, None], (b, h, t))
