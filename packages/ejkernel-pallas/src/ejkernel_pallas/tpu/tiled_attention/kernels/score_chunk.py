"""Shared by all kernels: scores, masks and dropout of a chunk of a tile pair."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.pair_functions import MAX_EXACT_INDEX, Distances, evaluate_pairs
from ejkernel_pallas.tpu.mosaic.split_functions import SplitFunction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product, repeat_lanes, row_to_column
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import ScoreChunk
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import TileRefs
from ejkernel_pallas.tpu.tiled_attention.plan import (
    key_tile_of_entry,
    query_tile_of_entry,
)
from ejkernel_pallas.tpu.tiled_attention.spec import MASKED_SCORE, TiledSpec


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
    derivative, distances = split.derivatives[row], _index_distances(refs, at)
    slope = evaluate_pairs(derivative, inputs, at.shape, distances)
    slope = slope if soft_cap_slope is None or row is not None else slope * soft_cap_slope
    return evaluate_pairs(split.pairs, inputs, at.shape, distances), slope


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
        conditions.append(evaluate_pairs(spec.mask_mod.pairs, inputs, at.shape, _index_distances(refs, at)))
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


def _index_distances(refs: TileRefs, at: ScoreChunk) -> Distances | None:
    """Returns the differences of the chunk's indices in float32; None if they may be too large for it, as those of a
    shard, which come from outside.
    """
    if refs.q_indices is not None or max(at.spec.num_queries, at.spec.num_keys) > MAX_EXACT_INDEX // 2:
        return None

    def distances(sign: int) -> jax.Array:
        first = (_first_distances(at) * sign).astype(jnp.float32)
        return _by_register(at, lambda offset: first + float(sign * offset))

    return distances


def _compare_distances(at: ScoreChunk, compare: Callable[[Any, Any], jax.Array], distance_bound: int) -> jax.Array:
    """Compares key index minus query index with a bound for every pair, register by register.

    The differences in each vector register are those of the first register plus a constant, which is moved to the
    bound: one comparison per register. The first depends on the table, so the compiler cannot share masks between
    chunks; shared masks would stay in registers from one chunk to the next, and spill.
    """
    first = _first_distances(at)
    return _by_register(at, lambda offset: compare(first, distance_bound - offset))


def _first_distances(at: ScoreChunk) -> jax.Array:
    """Returns key index minus query index in the first vector register of the chunk's scores, int32 [8, 128]."""
    spec = at.spec
    corner = (
        key_tile_of_entry(at.entry) * spec.block_kv
        + at.first_key
        - query_tile_of_entry(at.entry) * spec.block_q
        - at.first_query
    )
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1))
    return corner + (sublane - lane if spec.accumulates_for_keys else lane - sublane)


def _by_register(at: ScoreChunk, compute: Callable[[int], jax.Array]) -> jax.Array:
    """Returns an array of the chunk's pairs, `compute(offset)` for each vector register: distances in the register are
    those in the first one plus `offset`.
    """
    sign = 1 if at.spec.accumulates_for_keys else -1
    rows = [
        jnp.concatenate([compute(sign * (row - lane)) for lane in range(0, at.shape[1], LANES)], axis=1)
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
