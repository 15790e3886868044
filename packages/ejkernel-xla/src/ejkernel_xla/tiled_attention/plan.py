"""Cutting the arrays of a record into tiles.

Tiles are sliced out of the arrays in their layout, [B, T, H, D]: nothing is padded, transposed or repeated as a whole.
The last tile of an axis is moved back to end with the axis, so all tiles have one size; the indices it shares
with the tile before it are not `fresh`, and count only once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import TileCut

SCORES_PER_STEP = 2**20
"""Scores computed at once: 4 MiB of float32 keep a CPU's matrix products long and its caches warm."""


@dataclasses.dataclass(frozen=True)
class TiledAxis:
    """A sequence axis of `length` cut into tiles of `block` indices. A symbolic length is one tile."""

    length: Any
    block: Any

    @property
    def symbolic(self) -> bool:
        """Returns whether the length is known only when the program runs, as in `jax.export`."""
        return _is_symbolic(self.length)

    @property
    def tiles(self) -> int:
        """Returns the number of tiles."""
        if self.symbolic:
            return 1
        return cdiv(self.length, self.block)

    @property
    def has_overlapping_tiles(self) -> bool:
        """Returns whether the last tile shares indices with the one before it."""
        return not self.symbolic and self.length % self.block != 0

    def start(self, tile: Any) -> Any:
        """Returns first index of a tile, traced or not."""
        if self.symbolic:
            return jnp.zeros_like(tile)
        return jnp.minimum(tile * self.block, self.length - self.block)

    def fresh(self, tile: Any) -> jax.Array:
        """Returns bool [block], the indices of a tile that no earlier tile has."""
        return self.start(tile) + jnp.arange(self.block, dtype=jnp.int32) >= tile * self.block

    @property
    def cut(self) -> TileCut:
        """Returns the axis as `tile_pairs` takes it, for a length that is known."""
        return TileCut(self.length, self.block, last_tile_moved_back=True)


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """How a record is cut: `batch` rows times `heads` KV heads times one query tile per step of the outer loop.

    `group` query heads share a KV head; their rows stand next to each other in a tile, so keys are never repeated.
    """

    queries: TiledAxis
    keys: TiledAxis
    batch: int
    heads: int
    group: int
    chunks: tuple[int, int]

    @property
    def steps(self) -> int:
        """Returns steps of the outer loop."""
        return math.prod(self.chunks) * self.queries.tiles

    def outer_step(self, step: Any) -> "OuterStep":
        """Returns where a step of the outer loop works. All query tiles of the same heads follow each other."""
        chunk, tile = step // self.queries.tiles, step % self.queries.tiles
        rows, heads = chunk // self.chunks[1], chunk % self.chunks[1]
        return OuterStep(rows, tile, rows * self.batch, heads * self.heads, self.queries.start(tile))


class OuterStep(NamedTuple):
    """A step of the outer loop: chunk of batch rows, query tile, and the first batch row, KV head and query."""

    chunk: jax.Array
    tile: jax.Array
    batch: jax.Array
    head: jax.Array
    query: jax.Array


def make_plan(record: TiledAttention, q_blocksize: int, kv_blocksize: int) -> TilePlan:
    """Cuts a record whose lengths are all at least 1 into tiles of at most the given sizes."""
    (batch, length, heads, _), (_, keys, kv_heads, _) = record.query.shape, record.key.shape
    q_axis, kv_axis = _tiled_axis(length, q_blocksize), _tiled_axis(keys, kv_blocksize)
    group = heads // kv_heads
    if q_axis.symbolic or kv_axis.symbolic:
        return TilePlan(q_axis, kv_axis, 1, 1, group, (batch, kv_heads))
    # For short sequences, one batched product has several heads and rows, as many as fill a tile of scores.
    room = max(1, SCORES_PER_STEP // (group * q_axis.block * kv_axis.block))
    has_many_tiles = q_axis.tiles * kv_axis.tiles > 1
    heads_per_step = (
        1 if has_many_tiles and _heads_differ(record) else _largest_divisor(kv_heads, room)
    )  # each head skips other tiles
    takes_one_row = heads_per_step != kv_heads or _is_symbolic(batch)  # a symbolic batch has no divisor but 1
    rows = 1 if takes_one_row else _largest_divisor(batch, room // kv_heads)
    if has_many_tiles and _rows_differ(record):
        rows = 1  # each batch row then skips other tiles
    return TilePlan(q_axis, kv_axis, rows, heads_per_step, group, (batch // rows, kv_heads // heads_per_step))


def _tiled_axis(length: Any, block: int) -> TiledAxis:
    return TiledAxis(length, min(block, length) if isinstance(length, int) else length)


def take(x: jax.Array, starts: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """Returns a slice of x; dimensions of size 1 broadcast, so they are taken whole."""
    starts = [0 if n == 1 else start for n, start in zip(x.shape, starts, strict=True)]
    sizes = [_smaller_size(n, size) for n, size in zip(x.shape, sizes, strict=True)]
    return lax.dynamic_slice(x, _as_int32_offsets(starts), sizes)


def put(x: jax.Array, starts: Sequence[Any], tile: jax.Array) -> jax.Array:
    """Returns x with a slice replaced by tile."""
    return lax.dynamic_update_slice(x, tile.astype(x.dtype), _as_int32_offsets(starts))


def add(x: jax.Array, starts: Sequence[Any], tile: jax.Array) -> jax.Array:
    """Returns x with tile added to a slice; tile is summed over the dimensions that have size 1 in x alone."""
    starts = [0 if n == 1 else start for n, start in zip(x.shape, starts, strict=True)]
    shared = tuple(d for d, (n, size) in enumerate(zip(x.shape, tile.shape, strict=True)) if n == 1 and size != 1)
    tile = jnp.sum(tile, axis=shared, keepdims=True)
    return put(x, starts, take(x, starts, tile.shape) + tile)


def _as_int32_offsets(starts: Sequence[Any]) -> list[jax.Array]:
    return [jnp.asarray(start, jnp.int32) for start in starts]


def _is_symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def _smaller_size(n: Any, size: Any) -> Any:
    """Returns the smaller one. Of a symbolic axis one row is taken or all; one row is all that others
    may have of it.
    """
    if isinstance(n, int) and isinstance(size, int):
        return min(n, size)
    return n if n == 1 else size


def _largest_divisor(n: int, limit: int) -> int:
    """Returns the largest divisor of n that is at most limit (at least 1)."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, limit))


def _heads_differ(record: TiledAttention) -> bool:
    by_head = record.mask_mod is not None and "h" in record.mask_mod.program.inputs_read
    return by_head or (record.pattern is not None and record.pattern.heads is not None)


def _rows_differ(record: TiledAttention) -> bool:
    per_row = (record.q_segment_ids, record.kv_segment_ids, record.q_positions, record.kv_positions)
    by_row = record.mask_mod is not None and "b" in record.mask_mod.program.inputs_read
    return by_row or any(x is not None and x.shape[0] != 1 for x in per_row)
