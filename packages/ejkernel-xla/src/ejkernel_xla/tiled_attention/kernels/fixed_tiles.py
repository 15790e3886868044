"""Tiles of a call whose rows must not depend on what else the call has.

A tile has `block_q` queries of one segment of one batch row, and loops over tiles of `block_kv` keys of that segment,
which begin at the segment's first key:

    segment   |  0 1 2 3 .. | .. | .. |     key tiles at multiples of block_kv from its first key, in ascending order
    queries            |  t  |              any block_q of its queries, wherever a chunk of them begins

So a row is combined with the same keys in the same tiles in the same order in every call, and all products have one
shape. Keys that a row does not attend to add exact zeros, and so do tiles in which it attends to none. Rows are stably
sorted by segment, so that the keys of a segment are contiguous; the arrays are padded to whole tiles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel_xla.tiled_attention.plan import OuterStep, TiledAxis, TilePlan, take

_QUERY_FIELDS = ("query", "q_segment_ids", "q_positions")
_KEY_FIELDS = ("key", "value", "kv_segment_ids", "kv_positions")
_PAIR_FIELDS = ("bias", "mask")


@dataclasses.dataclass(frozen=True)
class TilesFrom(TiledAxis):
    """The tiles of an axis from an index `first` on, all whole: the axis is padded."""

    first: Any = 0

    def start(self, tile: Any) -> Any:
        """Returns first index of a tile."""
        return self.first + tile * self.block


@dataclasses.dataclass(frozen=True)
class FixedTiles:
    """A record that is cut into fixed tiles.

    Attributes:
        record: The record, sorted by segment and padded, with segment ids and positions.
        ids: Its segment ids of queries and of keys.
        positions: Its positions of queries and of keys.
        count: Number of query tiles, int32 scalar.
        batch: int32 [n], batch row of each.
        query: int32 [n], first query of each.
        length: Queries of a row in the call.
        order: int32 [B, T], which query each sorted one is; None if none has moved.
        block_q: Queries per tile.
        block_kv: Keys per tile.
    """

    record: TiledAttention
    ids: tuple[jax.Array, jax.Array]
    positions: tuple[jax.Array, jax.Array]
    count: jax.Array
    batch: jax.Array
    query: jax.Array
    length: int
    order: jax.Array | None
    block_q: int
    block_kv: int

    def at(self, step: jax.Array) -> tuple[OuterStep, TilePlan, jax.Array, jax.Array]:
        """Returns where a step works: query tile, plan of its keys, and the first and the end of its key tiles."""
        record, batch, query = self.record, self.batch[step], self.query[step]
        _, _, heads, _ = record.query.shape
        kv_heads = record.key.shape[2]
        segment, needed = self._needed_keys(batch, query)
        first_key = jnp.argmax(self.ids[1][batch] == segment).astype(jnp.int32)
        keys, count = jnp.arange(needed.shape[0], dtype=jnp.int32), jnp.any(needed)
        low = jnp.min(jnp.where(needed, keys, needed.shape[0]))
        high = jnp.max(jnp.where(needed, keys + 1, 0))
        plan = TilePlan(
            TilesFrom(self.block_q, self.block_q, query),
            TilesFrom(self.block_kv, self.block_kv, first_key),
            1,
            kv_heads,
            heads // kv_heads,
            (record.query.shape[0], 1),
        )
        first = jnp.where(count, (low - first_key) // self.block_kv, 0)
        end = jnp.where(count, cdiv(high - first_key, self.block_kv), 0)
        zero = jnp.zeros_like(batch)
        return OuterStep(batch, zero, batch, zero, query), plan, first, end

    def _needed_keys(self, batch: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the segment of a query tile, and which keys its rows may attend to by segment and position [S]."""
        left, right = causal_window_bounds(self.record)
        ids = take(self.ids[0], (batch, query), (1, self.block_q))[0]
        segment = ids[0]
        needed = self.ids[1][batch] == segment
        rows, key = (x[batch if x.shape[0] > 1 else 0] for x in self.positions)
        rows = take(rows, (query,), (self.block_q,))
        if left is not None:
            needed &= key >= jnp.min(jnp.where(ids == segment, rows, np.iinfo(np.int32).max)) - left
        if right is not None:
            needed &= key <= jnp.max(jnp.where(ids == segment, rows, np.iinfo(np.int32).min)) + right
        return segment, needed

    def in_call_order(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns an array with the record's queries along an axis as the call had them, without padding."""
        x = jax.lax.slice_in_dim(x, 0, self.length, axis=axis)
        if self.order is None:
            return x
        inverse = jnp.argsort(self.order, axis=1)
        shape = [1] * x.ndim
        shape[0], shape[axis] = inverse.shape
        return jnp.take_along_axis(x, inverse.reshape(shape), axis=axis)


def cut(record: TiledAttention, block_q: int, block_kv: int) -> FixedTiles:
    """Cuts a record whose lengths are all at least 1 into fixed tiles."""
    (batch, length, _, _), keys = record.query.shape, record.key.shape[1]
    packed = record.q_segment_ids is not None and record.kv_segment_ids is not None
    record = _with_ids_and_positions(record, packed)
    order = None
    if packed:
        record, order = _sorted_by_segment(record)
    queries = cdiv(length, block_q) * block_q + (block_q if packed else 0)
    # A segment's last tile may begin anywhere, and reaches beyond the array where the segment ends with it.
    record = _padded(record, queries - length, cdiv(keys, block_kv) * block_kv - keys + (block_kv if packed else 0))
    ids = _both_sides(record.q_segment_ids, record.kv_segment_ids)
    index = jnp.arange(queries, dtype=jnp.int32)
    begins = jnp.pad(ids[0][:, 1:] != ids[0][:, :-1], ((0, 0), (1, 0)), constant_values=True)
    run = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    first = (ids[0] >= 0) & ((index - run) % block_q == 0)
    most = batch * (length if packed else cdiv(length, block_q))
    where = jnp.nonzero(first.reshape(-1), size=most, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(first, dtype=jnp.int32)
    return FixedTiles(
        record=record,
        ids=ids,
        positions=_both_sides(record.q_positions, record.kv_positions),
        count=count,
        batch=where // queries,
        query=where % queries,
        length=length,
        order=order,
        block_q=block_q,
        block_kv=block_kv,
    )


def _both_sides(queries: jax.Array | None, keys: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the ids or the positions of queries and keys, which are not None."""
    assert queries is not None  # `_with_ids_and_positions` has made them
    assert keys is not None
    return queries, keys


def _with_ids_and_positions(record: TiledAttention, packed: bool) -> TiledAttention:
    """Returns the record with segment ids and positions: without them, the compiled program may round differently."""
    (batch, length, _, _), keys = record.query.shape, record.key.shape[1]
    changes: dict[str, Any] = {}
    for side, size in (("q", length), ("kv", keys)):
        ids, positions = getattr(record, f"{side}_segment_ids"), getattr(record, f"{side}_positions")
        changes[f"{side}_segment_ids"] = jnp.maximum(ids, -1) if packed else jnp.zeros((batch, size), jnp.int32)
        changes[f"{side}_positions"] = jnp.arange(size, dtype=jnp.int32)[None] if positions is None else positions
    return dataclasses.replace(record, **changes)


def _sorted_by_segment(record: TiledAttention) -> tuple[TiledAttention, jax.Array]:
    """Returns the record with queries and keys sorted by segment, stably, and the order of the queries [B, T]."""
    ids = _both_sides(record.q_segment_ids, record.kv_segment_ids)
    orders = [jnp.argsort(x, axis=1, stable=True) for x in ids]
    changes: dict[str, Any] = {}
    for names, order in zip((_QUERY_FIELDS, _KEY_FIELDS), orders, strict=True):
        changes |= {name: _along(getattr(record, name), order, 1) for name in names}
    for name in _PAIR_FIELDS:
        x = getattr(record, name)
        for axis, order in zip((2, 3), orders, strict=True):
            x = x if x is None or x.shape[axis] == 1 else _along(x, order, axis)
        changes[name] = x
    return dataclasses.replace(record, **changes), orders[0]


def _along(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """Returns x with the entries of an axis in an order [B, n] of each batch row."""
    x = jnp.broadcast_to(x, (order.shape[0], *x.shape[1:]))
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis)


def _padded(record: TiledAttention, queries: int, keys: int) -> TiledAttention:
    """Returns the record with `queries` more queries and `keys` more keys, which are padding."""
    changes: dict[str, Any] = {}
    for names, more in ((_QUERY_FIELDS, queries), (_KEY_FIELDS, keys)):
        for name in names:
            x = getattr(record, name)
            fill = -1 if name.endswith("segment_ids") else 0
            changes[name] = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    for name in _PAIR_FIELDS:
        if (x := getattr(record, name)) is not None:
            more = [n if size > 1 else 0 for n, size in zip((queries, keys), x.shape[2:], strict=True)]
            changes[name] = jnp.pad(x, ((0, 0), (0, 0), (0, more[0]), (0, more[1])))
    return dataclasses.replace(record, **changes)
