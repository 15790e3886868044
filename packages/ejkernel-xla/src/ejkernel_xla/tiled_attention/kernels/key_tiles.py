"""The block map of a call: which key tiles per query tile loops over, and which of them are full and need no masking.

    key tiles     |  empty  | partial |  full  |  full  | partial |  empty  |
                            ^ first   ^ full_start      ^ full_end ^ last

`ejkernel.families.tiled_attention.tile_pairs` sorts the tile pairs, once per call, into empty, full and partial ones.
Without explicit positions and segment ids this is arithmetic at trace time; otherwise the tables are traced, and loop
bounds follow the values. Windows, causal order and segments leave a contiguous run of tiles. Those of a pattern or of
a `mask_mod` need not be contiguous, and `ejkernel_xla.tiled_attention.kernels.patterns` lists them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import classify_tile_pairs, nonempty_and_full_tile_runs
from ejkernel_xla.tiled_attention.kernels.patterns import KeyTileLists, list_key_tiles
from ejkernel_xla.tiled_attention.kernels.scores import segment_ids
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan

Carry = TypeVar("Carry")
Step = Callable[[jax.Array, Carry], Carry]


@dataclasses.dataclass(frozen=True)
class KeyTileRuns:
    """The key tiles of each query tile: tiles `[first, last)` have pairs that attend, `[full_start, full_end)` are
    full.

    The four bounds are int32 [batch chunks | 1, query tiles]. `any_full` is False if it is known at trace time that no
    tile is full, and `any_partial` if it is known that no tile is partial.
    """

    first: Any
    full_start: Any
    full_end: Any
    last: Any
    any_full: bool
    any_partial: bool

    def fold_key_tiles(self, at: OuterStep, full_step: Step[Carry], partial_step: Step[Carry], carry: Carry) -> Carry:
        """Applies `full(tile, carry)` to the full key tiles of a query tile, and `partial(tile, carry)` to the partial
        ones.
        """
        first, full_start, full_end, last = (
            jnp.asarray(table)[at.chunk if table.shape[0] != 1 else 0, at.tile]
            for table in (self.first, self.full_start, self.full_end, self.last)
        )
        # Full tiles first: the online softmax does not depend on the order, and two loops compile two bodies instead of
        # three.
        if self.any_full:
            carry = lax.fori_loop(full_start, full_end, full_step, carry)
        if not self.any_partial:
            return carry
        before = full_start - first  # partial tiles lie on both sides of the full ones; one loop has them all
        count = before + last - full_end

        def step(n: jax.Array, carry: Carry) -> Carry:
            return partial_step(jnp.where(n < before, first + n, full_end + n - before), carry)

        return lax.fori_loop(jnp.zeros_like(count), count, step, carry)


def find_key_tiles(record: TiledAttention, plan: TilePlan) -> KeyTileRuns | KeyTileLists:
    """Sorts the tile pairs of a record into empty, full and partial ones."""
    if plan.queries.symbolic or plan.keys.symbolic:
        return _all_key_tiles(record, plan)
    some, every, traced = _classify_tiles(record, plan)
    if record.pattern is not None or record.mask_mod is not None:
        return list_key_tiles(record, plan, some, every)
    first, full_start, full_end, last = nonempty_and_full_tile_runs(some, every, jnp if traced else np)
    any_full = record.mask is None and (traced or bool((full_end > full_start).any()))
    any_partial = traced or bool((last - first > full_end - full_start).any())
    return KeyTileRuns(first, full_start, full_end, last, any_full, any_partial)


def _all_key_tiles(record: TiledAttention, plan: TilePlan) -> KeyTileRuns:
    """Returns every tile, as a partial one: a symbolic length has a single tile.

    Raises:
        NotImplementedError: The record has a pattern, which lists tiles.
    """
    if record.pattern is not None:
        raise NotImplementedError(
            f"pattern: got symbolic lengths {record.query.shape[1]} and {record.key.shape[1]}, wants numbers"
        )
    first = np.zeros((1, plan.queries.tiles), np.int32)
    last = first + plan.keys.tiles
    return KeyTileRuns(first, last, last, last, any_full=False, any_partial=True)


def _classify_tiles(record: TiledAttention, plan: TilePlan) -> tuple[Any, Any, bool]:
    """Returns which tile pairs have work and which of them are full, [chunks | 1, query tiles, key tiles], and whether
    the tables are traced.
    """
    if segment_ids(record) is None:
        record = dataclasses.replace(record, q_segment_ids=None, kv_segment_ids=None)
    some, every, xp = classify_tile_pairs(record, plan.queries.cut, plan.keys.cut)
    if plan.keys.has_overlapping_tiles:  # keys that the last tile shares with the one before it count once
        every = every & (np.arange(plan.keys.tiles) < plan.keys.tiles - 1)
    return _split_into_chunks(some, plan).any(axis=1), _split_into_chunks(every, plan).all(axis=1), xp is jnp


def _split_into_chunks(table: Any, plan: TilePlan) -> Any:
    """Returns [B|1, ...] as [chunks, rows per chunk, ...], or [1, 1, ...]."""
    rows = 1 if table.shape[0] == 1 else plan.batch
    return table.reshape(table.shape[0] // rows, rows, *table.shape[1:])
