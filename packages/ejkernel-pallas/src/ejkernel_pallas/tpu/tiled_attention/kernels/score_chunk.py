"""Shared by all kernels: scores, masks and dropout of a chunk of a tile pair.

tile pair (block_q x block_kv)          one chunk = one product
+-------+-------+-------+               buffer 0   buffer 1
| c0    | c1    | c2    |  chunk_q      c0         c1
+-------+-------+-------+               c2         c3      ...
| c3    | c4    | c5    |               chunks alternate between two buffers, so that the compiler can
+-------+-------+-------+               overlap the product of one with the softmax of the other
 chunk_kv
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.pair_functions import evaluate_pairs
from ejkernel_pallas.tpu.mosaic.split_functions import SplitFunction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product, repeat_lanes, row_to_column
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import TileRefs
from ejkernel_pallas.tpu.tiled_attention.plan import (
    HAS_WORK_FLAG,
    MASKED_FLAG,
    key_tile_of_entry,
    query_tile_of_entry,
    read_pair_entry,
)
from ejkernel_pallas.tpu.tiled_attention.spec import MASKED_SCORE, TiledSpec

DistinctRowsAndHeads = tuple[bool, bool]
"""Two flags: whether each batch row, and whether each head, has a separate list of tile pairs."""
MAX_DIAGONAL_CHUNK_SIZE = 256
"""The largest number of queries, and keys, of a chunk on the causal diagonal: small chunks have few masked pairs."""
MAX_UNROLLED_PAIRS = 2**20
"""The largest number of scores of a tile whose chunks are unrolled; larger tiles use a loop, for a short compile
time.
"""


class ScoreChunk(NamedTuple):
    """A part of a tile pair, the size of one product. Its scores are [queries, keys], or [keys, queries] if
    `accumulates_for_keys`.

    Attributes:
        entry: The tile pair's entry in the table.
        first_query: Index of the first query in the tile.
        num_queries: The number of queries.
        first_key: Index of the first key in the tile.
        num_keys: The number of keys.
        needs_mask: Whether some pair may be masked.
        spec: The kernel's constants.
        buffer_index: Which of the two scratch buffers the chunk uses, 0 or 1.
    """

    entry: Any
    first_query: Any
    num_queries: int
    first_key: Any
    num_keys: int
    needs_mask: bool
    spec: TiledSpec
    buffer_index: int = 0

    @property
    def query_slice(self) -> Any:
        """Returns the queries as a slice of the tile."""
        return pl.ds(self.first_query, self.num_queries)

    @property
    def key_slice(self) -> Any:
        """Returns the keys as a slice of the tile."""
        return pl.ds(self.first_key, self.num_keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the scores."""
        return (
            (self.num_keys, self.num_queries) if self.spec.accumulates_for_keys else (self.num_queries, self.num_keys)
        )

    def of(self, buffers: tuple[Ref, Ref]) -> Ref:
        """Returns the chunk's part of a double buffer in scratch memory."""
        return buffers[self.buffer_index].at[: self.shape[0], : self.shape[1]]


def current_entry(table: Any, distinct_rows_and_heads: DistinctRowsAndHeads) -> Any:
    """Returns the entry of the current step of a kernel whose grid is (batch rows, heads, tile pairs, ...)."""
    b, h, step = (pl.program_id(axis) for axis in range(3))
    return read_pair_entry(table, distinct_rows_and_heads, b, h, step, (pl.num_programs(1), pl.num_programs(2)))


def for_each_chunk(entry: Any, spec: TiledSpec, process_chunk: Callable[[ScoreChunk], None]) -> None:
    """Calls `process_chunk` with every chunk of a tile pair; chunks are masked if the pair is."""

    @pl.when((entry & (HAS_WORK_FLAG | MASKED_FLAG)) == HAS_WORK_FLAG)
    def _() -> None:
        _for_each_unmasked_chunk(entry, spec, process_chunk)

    if spec.needs_masks:

        @pl.when((entry & MASKED_FLAG) != 0)
        def _() -> None:
            for at in _list_chunks(entry, spec, (spec.block_q, spec.block_kv), masked=True):
                process_chunk(at)
    else:
        # Entries are positive, so this never runs. Without a second user of the scratch buffers, the compiler would
        # promote them to registers, which would then spill.
        @pl.when(entry < 0)
        def _() -> None:
            for parity in (0, 1):
                process_chunk(ScoreChunk(entry, 0, LANES, 0, LANES, False, spec, parity))


def _for_each_unmasked_chunk(entry: Any, spec: TiledSpec, process_chunk: Callable[[ScoreChunk], None]) -> None:
    """Calls `process_chunk` with every chunk of a full tile pair; a loop over the accumulated tile limits compile
    time.
    """
    if spec.block_q * spec.block_kv <= MAX_UNROLLED_PAIRS:
        for at in _list_chunks(entry, spec, (spec.block_q, spec.block_kv), masked=False):
            process_chunk(at)
        return
    stationary, size = ("first_key", spec.chunk_kv) if spec.accumulates_for_keys else ("first_query", spec.chunk_q)
    tile_shape = (spec.block_q, size) if spec.accumulates_for_keys else (size, spec.block_kv)

    def process_chunk_row(step: Any, carry: None) -> None:
        for at in _list_chunks(entry, spec, tile_shape, masked=False):
            process_chunk(at._replace(**{stationary: pl.multiple_of(step * size, LANES)}))

    lax.fori_loop(0, (spec.block_kv if spec.accumulates_for_keys else spec.block_q) // size, process_chunk_row, None)


def _list_chunks(entry: Any, spec: TiledSpec, tile_shape: tuple[int, int], masked: bool) -> list[ScoreChunk]:
    """Returns the chunks that cover the first queries and the first keys of a tile pair, `tile_shape` of them."""
    cut = masked and spec.cuts_diagonal_chunks
    chunk_q, chunk_kv = spec.chunk_q, spec.chunk_kv
    if cut and not spec.cuts_diagonal_by_keys and chunk_q > MAX_DIAGONAL_CHUNK_SIZE:
        chunk_q, chunk_kv = math.gcd(chunk_q, MAX_DIAGONAL_CHUNK_SIZE), math.gcd(chunk_kv, MAX_DIAGONAL_CHUNK_SIZE)
    chunks = [
        ScoreChunk(entry, query, chunk_q, key, chunk_kv, masked, spec)
        for query in range(0, tile_shape[0], chunk_q)
        for key in range(0, tile_shape[1], chunk_kv)
    ]
    if cut:
        chunks = [_cut_diagonal_chunk(at) for at in chunks if at.first_key < at.first_query + at.num_queries]
    return [at._replace(buffer_index=n % 2) for n, at in enumerate(chunks)]


def _cut_diagonal_chunk(at: ScoreChunk) -> ScoreChunk:
    """Returns a chunk on the diagonal without those masked pairs that fill whole lanes: early queries, or late keys."""
    at = at._replace(needs_mask=at.first_key + at.num_keys - 1 > at.first_query)
    if not at.spec.cuts_diagonal_by_keys:
        return at._replace(
            num_keys=min(at.num_keys, cdiv(at.first_query + at.num_queries - at.first_key, LANES) * LANES)
        )
    skipped = max(0, (at.first_key - at.first_query) // LANES * LANES)
    return at._replace(first_query=at.first_query + skipped, num_queries=at.num_queries - skipped)


def load_keys(ref: Any, at: ScoreChunk) -> jax.Array:
    """Returns the chunk's rows of keys or values, with 0 beyond the last key."""
    x = ref[at.key_slice, :]
    if not (at.needs_mask and at.spec.has_partial_key_tile):
        return x
    return _zero_rows_from(x, key_tile_of_entry(at.entry) * at.spec.block_kv + at.first_key, at.spec.num_keys)


def load_queries(ref: Any, at: ScoreChunk) -> jax.Array:
    """Returns the chunk's rows of queries or cotangents, with 0 beyond the last query."""
    x = ref[at.query_slice, :]
    if not (at.needs_mask and at.spec.has_partial_query_tile):
        return x
    return _zero_rows_from(x, query_tile_of_entry(at.entry) * at.spec.block_q + at.first_query, at.spec.num_queries)


def _zero_rows_from(x: jax.Array, first: Any, end: int) -> jax.Array:
    """Returns rows, with 0 from row `end` on: a block beyond the array may contain anything, NaN included."""
    index = first + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < end, x, jnp.zeros_like(x))


def scores(refs: TileRefs, key: jax.Array, query: jax.Array, at: ScoreChunk) -> tuple[jax.Array, jax.Array | None]:
    """Returns scores as powers of two before masking, and their slope by soft cap and `score_mod`."""
    spec, slope = at.spec, None
    pair = (key, query) if spec.accumulates_for_keys else (query, key)
    s = matrix_product(*pair, (1, 1), spec.precision)
    if spec.score_is_scaled_product:
        return s * spec.log2_scale, None
    s = s * spec.score_scale
    bias = _load_bias_or_mask(refs.bias, refs.bias_per_query, refs.bias_per_key, at)
    if bias is not None:
        s = s + bias
    if spec.soft_cap is not None:
        t = jnp.tanh(s * (1.0 / spec.soft_cap))
        # tanh(-inf) is -1, so a key that a bias of -inf masks would be attended.
        s = jnp.where(s == -jnp.inf, s, t * spec.soft_cap) if spec.has_bias else t * spec.soft_cap
        slope = 1.0 - t * t
    if spec.score_mod is not None:
        s, slope = _modify_scores(refs, s, slope, at)
    if spec.has_bias:
        return jnp.where(s == -jnp.inf, s, jnp.maximum(s * spec.log2_scale, MASKED_SCORE)), slope
    return s * spec.log2_scale, slope


def _modify_scores(
    refs: TileRefs, s: jax.Array, soft_cap_slope: jax.Array | None, at: ScoreChunk
) -> tuple[jax.Array, jax.Array]:
    """Returns scores after `score_mod`, and their derivative by the scores before the soft cap, or by a row."""
    split, row = at.spec.score_mod, at.spec.differentiated_row
    assert split is not None  # the caller looked
    inputs = [s, *_function_inputs(refs.score_rows, split, refs, at)]
    derivative = split.derivatives[row]
    slope = evaluate_pairs(derivative, inputs, at.shape)
    slope = slope if soft_cap_slope is None or row is not None else slope * soft_cap_slope
    return evaluate_pairs(split.pairs, inputs, at.shape), slope


def _function_inputs(rows: tuple[Ref, ...], split: SplitFunction, refs: TileRefs, at: ScoreChunk) -> list[jax.Array]:
    """Returns the rows of a function and the indices of queries and keys, to be broadcast against scores."""
    load = {"q_idx": broadcast_query_values, "k_idx": broadcast_key_values}
    values: list[jax.Array] = []
    for row, ref in zip(split.rows, rows, strict=True):
        axis = next((name for name in load if name in row.reads), None)
        value = ref[0, 0] if axis is None else load[axis](ref, at)
        values.append(jnp.broadcast_to(value, at.shape) != 0 if row.dtype == jnp.bool_ else value)
    q = _query_index(at) if refs.q_indices is None else broadcast_query_values(refs.q_indices, at)
    k = _key_index(at) if refs.k_indices is None else broadcast_key_values(refs.k_indices, at)
    return [*values, q, k]


def attending_pairs(refs: TileRefs, at: ScoreChunk) -> jax.Array:
    """Returns which pairs of a masked chunk attend."""
    spec, conditions = at.spec, []
    if spec.window_left is not None or spec.window_right is not None:
        conditions += _pairs_in_band(refs, at)
    if refs.q_ids is not None:
        q_ids, k_ids = broadcast_query_values(refs.q_ids, at), broadcast_key_values(refs.k_ids, at)
        conditions += [q_ids == k_ids, q_ids >= 0]
    for pair_ref, queries, keys in ((refs.mask, refs.mask_per_query, refs.mask_per_key), (refs.pattern, None, None)):
        mask = _load_bias_or_mask(pair_ref, queries, keys, at)
        if mask is not None:
            conditions.append(mask != 0.0)
    if spec.mask_mod is not None:
        inputs = _function_inputs(refs.mask_rows, spec.mask_mod, refs, at)
        conditions.append(evaluate_pairs(spec.mask_mod.pairs, inputs, at.shape))
    if spec.has_partial_key_tile:
        conditions.append(_key_index(at) < spec.num_keys)
    if spec.has_partial_query_tile:
        conditions.append(_query_index(at) < spec.num_queries)
    mask = jnp.broadcast_to(conditions[0], at.shape)
    for condition in conditions[1:]:
        mask = mask & condition
    return mask


def apply_mask(x: jax.Array, masked_value: float, refs: TileRefs, at: ScoreChunk) -> jax.Array:
    """Returns scores or weights of a masked chunk, with `masked_value` where pairs do not attend."""
    key_distance = at.first_key + at.num_keys - at.first_query
    if not (at.spec.cuts_diagonal_chunks and at.spec.cuts_diagonal_by_keys and key_distance < at.num_queries):
        return jnp.where(attending_pairs(refs, at), x, masked_value)
    axis = 1 if at.spec.accumulates_for_keys else 0
    on_diagonal, after_diagonal = jnp.split(x, [key_distance], axis=axis)  # later queries attend all keys of the chunk
    return jnp.concatenate(
        [
            jnp.where(attending_pairs(refs, at._replace(num_queries=key_distance)), on_diagonal, masked_value),
            after_diagonal,
        ],
        axis=axis,
    )


def double_buffer(shape: tuple[int, int], dtype: Any) -> tuple[Any, Any]:
    """Returns double buffers in VMEM for scores or weights of chunks, which would spill from registers.

    They are two arrays instead of one of twice the size, because the compiler orders accesses per array: in a single
    one, the writes of a chunk would wait for the reads of the previous chunk.
    """
    return pltpu.VMEM(shape, dtype), pltpu.VMEM(shape, dtype)


def dropout_scratch(spec: TiledSpec) -> dict[str, Any]:
    """Returns scratch memory for dropout's hash keys of the accumulated tile."""
    stationary = spec.block_kv if spec.accumulates_for_keys else spec.block_q
    return {} if spec.dropout_threshold is None else {"dropout_keys_column": pltpu.VMEM((stationary, LANES), jnp.int32)}


def transpose_dropout_keys(refs: TileRefs, spec: TiledSpec) -> None:
    """Copies dropout's hash keys of the accumulated tile from lanes to sublanes, the axis of that tile in scores."""
    if spec.dropout_threshold is not None:
        refs.dropout_keys_column[...] = row_to_column(
            (refs.dropout_column_keys if spec.accumulates_for_keys else refs.dropout_row_keys)[...]
        )


def apply_dropout(x: jax.Array, refs: TileRefs, at: ScoreChunk) -> jax.Array:
    """Returns x with 0 where dropout drops it; other elements are not scaled."""
    if at.spec.dropout_threshold is None:
        return x
    stationary, across = (
        (at.key_slice, refs.dropout_row_keys[:, at.query_slice])
        if at.spec.accumulates_for_keys
        else (at.query_slice, refs.dropout_column_keys[:, at.key_slice])
    )
    dropout_products = repeat_lanes(refs.dropout_keys_column[stationary, :], at.shape[1]) * across
    # An unsigned comparison in signed arithmetic: both sides have their top bit flipped. In the products the column
    # keys contribute the flip: row keys are odd, so a flipped top bit stays flipped.
    return jnp.where(dropout_products >= jnp.int32(at.spec.dropout_threshold - 2**31), x, 0.0)


def broadcast_query_values(ref: Any, at: ScoreChunk) -> jax.Array:
    """Returns the chunk's part of a row [1, block_q], to be broadcast against scores."""
    row = _load_row_as_32_bits(ref, at.query_slice)
    return row if at.spec.accumulates_for_keys else repeat_lanes(row_to_column(row), at.num_keys)


def broadcast_key_values(ref: Any, at: ScoreChunk) -> jax.Array:
    """Returns the chunk's part of a row [1, block_kv], to be broadcast against scores."""
    row = _load_row_as_32_bits(ref, at.key_slice)
    return repeat_lanes(row_to_column(row), at.num_queries) if at.spec.accumulates_for_keys else row


def _load_row_as_32_bits(ref: Any, row_slice: slice) -> jax.Array:
    """Returns part of a row in 32 bits: not every chip broadcasts and transposes narrower types."""
    row = ref[:, row_slice]
    return row if row.dtype.itemsize == 4 else row.astype(jnp.float32)


def _pairs_in_band(refs: TileRefs, at: ScoreChunk) -> list[jax.Array]:
    spec = at.spec
    if refs.q_positions is not None or refs.k_positions is not None:
        q = _query_index(at) if refs.q_positions is None else broadcast_query_values(refs.q_positions, at)
        k = _key_index(at) if refs.k_positions is None else broadcast_key_values(refs.k_positions, at)
        band_masks = [] if spec.window_left is None else [k - q >= -spec.window_left]
        return band_masks if spec.window_right is None else [*band_masks, k - q <= spec.window_right]
    band_masks = [] if spec.window_left is None else [_compare_distances(at, jnp.greater_equal, -spec.window_left)]
    return (
        band_masks
        if spec.window_right is None
        else [*band_masks, _compare_distances(at, jnp.less_equal, spec.window_right)]
    )


def _compare_distances(at: ScoreChunk, compare: Callable[[Any, Any], jax.Array], distance_bound: int) -> jax.Array:
    """Compares key index minus query index with a bound for every pair, register by register.

    The differences in each vector register are those of the first register plus a constant, which is moved to the
    distance_bound: one comparison per register. The first depends on the table, so the compiler cannot share masks
        between
    chunks; shared masks would stay in registers from one chunk to the next, and spill.
    """
    spec, sign = at.spec, 1 if at.spec.accumulates_for_keys else -1
    corner = (
        key_tile_of_entry(at.entry) * spec.block_kv
        + at.first_key
        - query_tile_of_entry(at.entry) * spec.block_q
        - at.first_query
    )
    across = [lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1)]
    first = corner + sign * (across[0] - across[1])
    rows = [
        jnp.concatenate(
            [compare(first, distance_bound - sign * (row - lane)) for lane in range(0, at.shape[1], LANES)], axis=1
        )
        for row in range(0, at.shape[0], SUBLANES)
    ]
    return jnp.concatenate(rows, axis=0)


def _load_bias_or_mask(bias_or_mask_ref: Ref, queries: Ref, keys: Ref, at: ScoreChunk) -> jax.Array | None:
    """Returns a bias or mask of the chunk's pairs, in float32, to be broadcast against scores; None if there is
    none.
    """
    if bias_or_mask_ref is not None:
        x = bias_or_mask_ref[at.query_slice, at.key_slice].astype(jnp.float32)
        return x.T if at.spec.accumulates_for_keys else x
    if queries is not None:
        return broadcast_query_values(queries, at)
    return None if keys is None else broadcast_key_values(keys, at)


def _key_index(at: ScoreChunk) -> jax.Array:
    return key_tile_of_entry(at.entry) * at.spec.block_kv + at.first_key + _index_along(at, key=True)


def _query_index(at: ScoreChunk) -> jax.Array:
    return query_tile_of_entry(at.entry) * at.spec.block_q + at.first_query + _index_along(at, key=False)


def _index_along(at: ScoreChunk, key: bool) -> jax.Array:
    """Returns, for every pair, the index of its key or of its query in the chunk."""
    return lax.broadcasted_iota(jnp.int32, at.shape, 0 if key == at.spec.accumulates_for_keys else 1)
