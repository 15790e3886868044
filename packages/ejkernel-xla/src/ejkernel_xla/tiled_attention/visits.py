"""Which key tiles a query tile visits, and which of those need no masking.

For every tile the extremes of its positions and segment ids decide, once per call: a tile pair is *empty* when no
query of it can see any key, and *full* when every query sees every key. Without explicit positions and segment ids
this is arithmetic at trace time; otherwise the tables are traced, and loop bounds follow the values. The tiles left by
masks of that kind lie next to each other; those of a pattern need not, and `ejkernel_xla.tiled_attention.patterns`
lists them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel_xla.tiled_attention.blocks import Axis, Cursor, Plan
from ejkernel_xla.tiled_attention.patterns import ListedVisits, list_visits
from ejkernel_xla.tiled_attention.scores import segment_ids

Carry = TypeVar("Carry")
Step = Callable[[jax.Array, Carry], Carry]


@dataclasses.dataclass(frozen=True)
class Visits:
    """Key tiles to visit: `[first, last)`, of which `[clear, unclear)` are full.

    All four are int32 [batch chunks | 1, query tiles]; `any_full` and `any_masked` are False when it is known at trace
    time that there is no such tile.
    """

    first: Any
    last: Any
    clear: Any
    unclear: Any
    any_full: bool
    any_masked: bool

    def fold(self, at: Cursor, full: Step[Carry], masked: Step[Carry], carry: Carry) -> Carry:
        """Applies `full(tile, carry)` or `masked(tile, carry)` to every key tile that the query tile visits."""
        first, last, clear, unclear = (
            jnp.asarray(table)[at.chunk if table.shape[0] != 1 else 0, at.tile]
            for table in (self.first, self.last, self.clear, self.unclear)
        )
        if self.any_full:
            carry = lax.fori_loop(clear, unclear, full, carry)
        if not self.any_masked:
            return carry
        before = clear - first  # the masked tiles lie on both sides of the full ones; one loop walks them all
        count = before + last - unclear

        def step(n: jax.Array, carry: Carry) -> Carry:
            return masked(jnp.where(n < before, first + n, unclear + n - before), carry)

        return lax.fori_loop(jnp.zeros_like(count), count, step, carry)


def find_visits(record: TiledAttention, plan: Plan) -> Visits | ListedVisits:
    """Sorts the tile pairs of a record into empty, full and masked ones."""
    if plan.queries.symbolic or plan.keys.symbolic:
        return _all_visits(record, plan)
    some, every, traced = _sorted(record, plan)
    if record.pattern is not None:
        return list_visits(record, record.pattern, plan, some, every)
    first, last, clear, unclear = _runs(some, every, jnp if traced else np)
    any_full = record.mask is None and (traced or bool((unclear > clear).any()))
    any_masked = traced or bool((last - first > unclear - clear).any())
    return Visits(first, last, clear, unclear, any_full, any_masked)


def _all_visits(record: TiledAttention, plan: Plan) -> Visits:
    """Every tile, masked: of a symbolic length there is one.

    Raises:
        NotImplementedError: The record has a pattern, which lists tiles.
    """
    if record.pattern is not None:
        raise NotImplementedError(f"pattern: got symbolic lengths {record.query.shape[1]} and {record.key.shape[1]}")
    first = np.zeros((1, plan.queries.tiles), np.int32)
    last = first + plan.keys.tiles
    return Visits(first, last, last, last, any_full=False, any_masked=True)


def _sorted(record: TiledAttention, plan: Plan) -> tuple[Any, Any, bool]:
    """Which tile pairs have work and which of them are full, [chunks | 1, query tiles, key tiles], and whether the
    tables are traced."""
    ids = segment_ids(record)
    traced = record.q_positions is not None or record.kv_positions is not None or ids is not None
    xp = jnp if traced else np
    some, every = _banded(record, plan, xp)
    if ids is not None:
        some_segment, every_segment = _segmented(*ids, plan)
        some, every = some & some_segment, every & every_segment
    if plan.keys.ragged:
        every = every & (np.arange(plan.keys.tiles) < plan.keys.tiles - 1)
    some, every = _per_chunk(some, plan).any(axis=1), _per_chunk(every, plan).all(axis=1)
    if record.mask is not None:
        every = every & False
    return some, every, traced


def _banded(record: TiledAttention, plan: Plan, xp: Any) -> tuple[Any, Any]:
    """Whether some and every pair of a tile is in the band, both [B|1, query tiles, key tiles]."""
    left, right = band(record)
    q_low, q_high = _extremes(record.q_positions, plan.queries)
    k_low, k_high = _extremes(record.kv_positions, plan.keys)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = xp.ones((1, plan.queries.tiles, plan.keys.tiles), bool)
    every = some
    if left is not None:
        some, every = some & (k_high >= q_low - left), every & (k_low >= q_high - left)
    if right is not None:
        some, every = some & (k_low <= q_high + right), every & (k_high <= q_low + right)
    return some, every


def _segmented(q_ids: jax.Array, kv_ids: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Likewise for equal segment ids >= 0. Overlapping ranges of ids may still turn out to have no pair."""
    q_low, q_high = _extremes(q_ids, plan.queries)
    k_low, k_high = _extremes(kv_ids, plan.keys)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    some = (jnp.maximum(q_low, k_low) <= jnp.minimum(q_high, k_high)) & (jnp.minimum(q_high, k_high) >= 0)
    every = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return some, every


def _extremes(values: jax.Array | None, axis: Axis) -> tuple[Any, Any]:
    """Smallest and largest value of every tile, [B|1, tiles]; the indices themselves where values is None."""
    tiles = axis.indices()[None] if values is None else values[:, axis.indices()]
    return tiles.min(axis=-1), tiles.max(axis=-1)


def _per_chunk(table: Any, plan: Plan) -> Any:
    """[B|1, ...] as [chunks, rows a chunk, ...], or [1, 1, ...]."""
    rows = 1 if table.shape[0] == 1 else plan.batch
    return table.reshape(table.shape[0] // rows, rows, *table.shape[1:])


def _runs(some: Any, every: Any, xp: Any) -> tuple[Any, Any, Any, Any]:
    """The span of key tiles that have work, and the first run of full tiles in it, each [chunks, query tiles]."""
    tiles = some.shape[-1]
    index = np.arange(tiles, dtype=np.int32)
    first = xp.where(some, index, tiles).min(axis=-1)
    last = xp.where(some, index + 1, 0).max(axis=-1)
    first = xp.minimum(first, last)  # nothing to visit: an empty span
    clear = xp.where(every, index, tiles).min(axis=-1)
    unclear = xp.where(~every & (index > clear[..., None]), index, tiles).min(axis=-1)
    none = clear == tiles
    return first, last, xp.where(none, last, clear), xp.where(none, last, unclear)
