"""`score_mod` and `mask_mod` of a product: loads the values that `mosaic.paged_functions` lists, and computes the rest
for all pairs of the product.

HBM   function_rows_by_query [Hk, rows, 128]        function_rows_by_key [N|1, lines, 1, keys]
  │   copied with the queries of an item              │   copied with the pages of a block
  ▼                                                   ▼
VMEM  function_queries_buffer[slot]  _rows_by_head   function_keys_buffer[slot]
          a lane of rows, broadcast to keys              a line of keys, broadcast to rows
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.paged_functions import BY_HEAD, BY_KEY, RowPlace
from ejkernel_pallas.tpu.mosaic.pair_functions import evaluate_pairs
from ejkernel_pallas.tpu.mosaic.vectors import LANES, repeat_lanes
from ejkernel_pallas.tpu.paged_attention.kernels.copies import KeyBlock
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import KeyChunk, key_and_head_of_index
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec
from ejkernel_pallas.tpu.tiled_attention.spec import MASKED_SCORE


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
    """Returns scores as powers of two after the functions; -inf where `mask_mod` is False.

    Args:
        refs: Buffers of the functions' values.
        s: The scores; in their own unit if there is a `score_mod`, else as powers of two.
        at: The pairs.
        spec: The kernel's constants.
    """
    functions, shape = spec.functions, (at.num_rows, at.key_positions.shape[1])
    assert functions is not None  # the caller looked
    if functions.score_mod is not None:
        s = evaluate_pairs(functions.score_mod.pairs, [s, *_inputs(refs, "score_mod", at, shape, spec)], shape)
        # A finite score stays finite, since one of -inf masks.
        s = jnp.where(s == -jnp.inf, s, jnp.maximum(s * LOG2E, MASKED_SCORE))
    if functions.mask_mod is not None:
        mask = evaluate_pairs(functions.mask_mod.pairs, _inputs(refs, "mask_mod", at, shape, spec), shape)
        s = jnp.where(mask, s, -jnp.inf)
    return s


def _inputs(refs: PagedRefs, name: str, at: FunctionPairs, shape: tuple[int, int], spec: PagedSpec) -> list[jax.Array]:
    """Returns the values of a function and the positions of queries and keys, for all pairs."""
    functions = spec.functions
    assert functions is not None  # the caller looked
    values = [
        _as_dtype(_load(refs, place, at, shape, spec), row.dtype)
        for row, place in zip(getattr(functions, name).rows, functions.places(name, spec.heads), strict=True)
    ]
    return [*values, _query_positions(refs, at, shape, spec), jnp.broadcast_to(at.key_positions, shape)]


def _load(refs: PagedRefs, place: RowPlace, at: FunctionPairs, shape: tuple[int, int], spec: PagedSpec) -> jax.Array:
    """Returns a value for all pairs, int32."""
    rows, lane = pl.ds(at.first_row, at.num_rows), slice(place.position, place.position + 1)
    if place.kind == BY_HEAD:
        return jnp.broadcast_to(refs.function_rows_by_head[at.head, rows, lane], shape)
    if place.kind != BY_KEY:
        return jnp.broadcast_to(refs.function_queries_buffer[at.buffer_slot, at.head, rows, lane], shape)
    keys = pl.ds(pl.multiple_of(at.keys.start_in_buffer, LANES), at.keys.num_keys)

    def line(index: Any) -> jax.Array:
        return jnp.broadcast_to(refs.function_keys_buffer[at.keys.buffer_slot, index, :, keys], shape)

    if not place.reads_head:
        return line(place.position)
    first = place.position + at.head * spec.group_size
    head_of_row = (lax.broadcasted_iota(jnp.int32, shape, 0) + at.first_row) % spec.group_size
    value = line(first)
    for n in range(1, spec.group_size):
        value = jnp.where(head_of_row == n, line(first + n), value)
    return value


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return x != 0
    return lax.bitcast_convert_type(x, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else x


def _query_positions(refs: PagedRefs, at: FunctionPairs, shape: tuple[int, int], spec: PagedSpec) -> jax.Array:
    rows = pl.ds(at.first_row, at.num_rows)
    if spec.has_row_positions:
        return repeat_lanes(refs.position_buffer[at.buffer_slot, rows, :], shape[1])
    if spec.tokens_per_tile == 1:
        return jnp.full(shape, at.tile_position, jnp.int32)
    return repeat_lanes(refs.token_of_row[rows, :] + at.tile_position, shape[1])
