"""`score_mod` and `mask_mod` of a product: loads the values that `mosaic.paged_functions` lists, and computes the rest
for all pairs of the product.

HBM   function_rows_by_query [planes, rows, 128]    function_rows_by_key [N|1, lines, 1, keys]
  │   copied with the queries of an item              │   copied with the pages of a block
  ▼                                                   ▼
VMEM  function_queries_buffer[slot]  _rows_by_head   function_keys_buffer[slot]
          rows, the same in every lane                   a line of keys, broadcast to rows

A broadcast of one lane to all takes the slow XLU, and the registers that wait for it would spill. So values of rows are
stored in every lane. Functions are computed for 128 keys at a time.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.paged_functions import BY_HEAD, BY_QUERY, RowPlace
from ejkernel_pallas.tpu.mosaic.pair_functions import MAX_EXACT_INDEX, Distances, evaluate_pairs
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, lane_groups
from ejkernel_pallas.tpu.paged_attention.kernels.copies import KeyBlock
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import KeyChunk, key_and_head_of_index
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec


class FunctionPairs(NamedTuple):
    """The pairs of one product.

    Attributes:
        head: Index of the KV head.
        buffer_slot: The slot of the buffers that have the queries.
        first_row: Index of the first row in the tile.
        num_rows: The number of rows.
        tile_position: Position of the tile's first token in its sequence.
        keys: The chunk of keys.
        key_positions: int32 [1, n], the position of each key in its sequence.
    """

    head: Any
    buffer_slot: Any
    first_row: Any
    num_rows: int
    tile_position: Any
    keys: KeyChunk
    key_positions: jax.Array


def key_positions(at: KeyChunk, spec: PagedSpec) -> jax.Array | None:
    """Returns the positions of a chunk's keys, int32 [1, n]; None without functions."""
    if spec.functions is None:
        return None
    index = lax.broadcasted_iota(jnp.int32, (1, at.num_keys * spec.heads_per_product), 1)
    return key_and_head_of_index(index, at.num_keys, spec)[0] + at.first_key


def copy_key_rows(refs: PagedRefs, block: KeyBlock, spec: PagedSpec, *, wait: bool) -> None:
    """Starts the copy of the values of a block's keys, or waits for it."""
    sequence = block.item.sequence if refs.function_rows_by_key.shape[0] > 1 else 0
    start = pl.multiple_of(block.index_in_sequence * spec.block_kv, spec.block_kv)
    copy = pltpu.make_async_copy(
        refs.function_rows_by_key.at[sequence, :, :, pl.ds(start, spec.block_kv)],
        refs.function_keys_buffer.at[block.buffer_slot],
        refs.function_keys_arrived.at[block.buffer_slot],
    )
    copy.wait() if wait else copy.start()


def apply_functions(refs: PagedRefs, s: jax.Array, at: FunctionPairs, spec: PagedSpec) -> jax.Array:
    """Returns scores after the functions; -inf where `mask_mod` is False.

    Args:
        refs: Buffers of the functions' values.
        s: The scores.
        at: The pairs.
        spec: The kernel's constants.
    """
    groups = [_apply_to_lanes(refs, x, n * LANES, at, spec) for n, x in enumerate(lane_groups(s))]
    return jnp.concatenate(groups, axis=1)


def _apply_to_lanes(refs: PagedRefs, s: jax.Array, lane: int, at: FunctionPairs, spec: PagedSpec) -> jax.Array:
    functions, shape, distances = spec.functions, (at.num_rows, LANES), _position_distances(refs, lane, at, spec)
    assert functions is not None  # the caller looked
    if functions.score_mod is not None:
        inputs = [s, *_inputs(refs, "score_mod", lane, at, spec)]
        s = evaluate_pairs(functions.score_mod.pairs, inputs, shape, distances)
    if functions.mask_mod is not None:
        inputs = _inputs(refs, "mask_mod", lane, at, spec)
        mask = evaluate_pairs(functions.mask_mod.pairs, inputs, shape, distances)
        s = jnp.where(mask, s, -jnp.inf)
    return s


def _inputs(refs: PagedRefs, name: str, lane: int, at: FunctionPairs, spec: PagedSpec) -> list[jax.Array]:
    """Returns the values of a function and the positions of queries and keys, [rows, 128] or [1, 128], for the pairs
    with 128 keys from `lane` on.
    """
    functions = spec.functions
    assert functions is not None  # the caller looked
    values = [
        _as_dtype(_load(refs, place, lane, at, spec), row.dtype)
        for row, place in zip(
            getattr(functions, name).rows, functions.places(name, spec.heads, spec.kv_heads), strict=True
        )
    ]
    return [*values, _query_positions(refs, at, spec), at.key_positions[:, lane : lane + LANES]]


def _load(refs: PagedRefs, place: RowPlace, first_lane: int, at: FunctionPairs, spec: PagedSpec) -> jax.Array:
    """Returns a value of rows or of the 128 keys from `first_lane` on, int32 [rows, 128] or [1, 128]."""
    if place.kind == BY_QUERY:
        plane = place.position + at.head if place.reads_head else place.position
        return refs.function_queries_buffer[at.buffer_slot, plane, pl.ds(at.first_row, at.num_rows), :]
    period = rows_per_head_period(spec)
    # Products of one size begin at multiples of it.
    aligned = isinstance(at.first_row, int) or at.num_rows % period == 0
    start = 0 if aligned else pl.multiple_of(at.first_row - divide(at.first_row, period) * period, SUBLANES)
    if place.kind == BY_HEAD:
        lanes = slice(place.position * LANES, (place.position + 1) * LANES)
        return _repeat_rows(refs.function_rows_by_head[at.head, pl.ds(start, period), lanes], at.num_rows)
    keys = pl.ds(pl.multiple_of(at.keys.start_in_buffer + first_lane, LANES), LANES)

    def line(index: Any) -> jax.Array:
        return refs.function_keys_buffer[at.keys.buffer_slot, index, :, keys]

    if not place.reads_head:
        return line(place.position)
    first = place.position + at.head * spec.group_size
    head_of_row = (lax.broadcasted_iota(jnp.int32, (period, LANES), 0) + start) % spec.group_size
    value = jnp.broadcast_to(line(first), head_of_row.shape)
    for n in range(1, spec.group_size):
        value = jnp.where(head_of_row == n, line(first + n), value)
    return _repeat_rows(value, at.num_rows)


def rows_per_head_period(spec: PagedSpec) -> int:
    """Returns the number of rows, a multiple of 8, after which the query heads of a tile's rows repeat."""
    return math.lcm(spec.group_size, SUBLANES)


def _repeat_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Returns `num_rows` rows, those of x again and again: the same registers, instead of more loads."""
    return jnp.concatenate([x] * cdiv(num_rows, x.shape[0]), axis=0)[:num_rows]


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return x != 0
    return lax.bitcast_convert_type(x, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else x


def _position_distances(refs: PagedRefs, lane: int, at: FunctionPairs, spec: PagedSpec) -> Distances | None:
    """Returns the differences of positions of the pairs with 128 keys from `lane` on, in float32.

    The tile's position is subtracted from those of keys, [1, 128], instead of being added to those of all rows. Returns
    None where that saves nothing: rows have positions, or all have one. And None if positions may be too large.
    """
    max_keys = spec.pages_per_sequence * spec.cache_layout.slots_per_page
    if spec.has_row_positions or spec.tokens_per_tile == 1 or max_keys > MAX_EXACT_INDEX // 2:
        return None

    def distances(sign: int) -> jax.Array:
        key = (at.key_positions[:, lane : lane + LANES] - at.tile_position).astype(jnp.float32)
        token = refs.token_of_row[pl.ds(at.first_row, at.num_rows), :].astype(jnp.float32)
        return key - token if sign > 0 else token - key

    return distances


def _query_positions(refs: PagedRefs, at: FunctionPairs, spec: PagedSpec) -> jax.Array:
    rows = pl.ds(at.first_row, at.num_rows)
    if spec.has_row_positions:
        return refs.position_buffer[at.buffer_slot, rows, :]
    if spec.tokens_per_tile == 1:
        return jnp.full((1, LANES), at.tile_position, jnp.int32)
    return refs.token_of_row[rows, :] + at.tile_position
