"""The list of the selected keys of a query, first in the order of keys, then by descending score.

Numbers are moved by products: position p = 128 high + low is an entry of [rows of a list, 128], and

    list[high, low] = sum over keys of (value if its position has this high, else 0) (1 if it has this low, else 0)

has one term. Values are bytes, which bfloat16 holds; scores have four of them, and indices two or three.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.families.lightning_indexer import floats_from_ordered_integers
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.score_tile import NOT_SELECTABLE
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.selected_positions import for_each_block
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import SCORE_BYTES, IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product, row_to_column

BYTE_BITS = 8
LANE_BITS = LANES.bit_length() - 1


def store_list(
    refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, bounds: tuple[Any, Any], t: Any, num_selected: Any
) -> None:
    """Stores the selected scores of query t and their keys in the list, in the order of keys; scores after the last one
    are not selectable.
    """
    refs.placed[...] = jnp.zeros(refs.placed.shape, jnp.float32)

    def place_block(start: Any, carry: None) -> None:
        rows = pl.ds(start, SUBLANES)
        key = (start + lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)) * LANES
        key = key + lax.broadcasted_iota(jnp.int32, key.shape, 1)
        pieces = _pieces(refs.ordered_scores[t, rows, :], key, spec)
        refs.placed[...] += _place(refs.positions[rows, :], pieces, spec)

    for_each_block(bounds, SUBLANES, place_block, None)
    in_order, refs.list_indices[...] = _numbers(refs, spec)
    refs.list_scores[...] = jnp.where(_list_position(in_order.shape) < num_selected, in_order, NOT_SELECTABLE)


def sort_list(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, num_selected: Any) -> None:
    """Sorts the list by descending scores, of equal ones the lower key first; its entries after the last are undefined.

    The position of an entry is the number of larger scores, and of equal ones before it.
    """
    rows = spec.list_rows
    for_each_index(rows, lambda row: _store_score_column(refs, row))
    for_each_index(rows, lambda row: _store_position(refs, spec, row, num_selected))
    refs.placed[...] = jnp.zeros(refs.placed.shape, jnp.float32)

    def place_block(n: Any) -> None:
        block = pl.ds(pl.multiple_of(n * SUBLANES, SUBLANES), SUBLANES)
        pieces = _pieces(refs.list_scores[block, :], refs.list_indices[block, :], spec)
        refs.placed[...] += _place(refs.list_positions[block, :], pieces, spec)

    for_each_index(rows // SUBLANES, place_block)


def store_results(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, t: Any, num_selected: Any) -> None:
    """Stores the sorted list of query t, -1 and -inf after the last selected key."""
    in_order, index = _numbers(refs, spec)
    is_key = _list_position(in_order.shape) < num_selected
    refs.scores[t] = jnp.where(is_key, floats_from_ordered_integers(in_order, jnp.float32), -jnp.inf)
    refs.indices[t] = jnp.where(is_key, index, -1)


def _list_position(shape: tuple[int, ...]) -> jax.Array:
    """Returns the positions of the entries of a list, [rows, 128]."""
    return lax.broadcasted_iota(jnp.int32, shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, shape, 1)


def _pieces(in_order: jax.Array, key: jax.Array, spec: IndexerDecodeSpec) -> list[jax.Array]:
    """Returns the bytes of ordered scores, the lowest first, then the lane of each key and the bytes of its row."""

    def byte(x: jax.Array, n: int) -> jax.Array:
        return lax.shift_right_logical(x, jnp.int32(n * BYTE_BITS)) & 255

    row = lax.shift_right_logical(key, jnp.int32(LANE_BITS))
    of_row = [byte(row, n) for n in range(spec.num_pieces - SCORE_BYTES - 1)]
    pieces = [*(byte(in_order, n) for n in range(SCORE_BYTES)), key & (LANES - 1), *of_row]
    return [x.astype(jnp.float32) for x in pieces]


def _numbers(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec) -> tuple[jax.Array, jax.Array]:
    """Returns ordered scores and keys of the bytes that were placed, [rows of a list, 128] int32."""
    rows = spec.list_rows
    pieces = [refs.placed[n * rows : (n + 1) * rows, :].astype(jnp.int32) for n in range(spec.num_pieces)]
    score, key = pieces[0], pieces[SCORE_BYTES]
    for n in range(1, SCORE_BYTES):
        score = score + lax.shift_left(pieces[n], jnp.int32(n * BYTE_BITS))
    for n, x in enumerate(pieces[SCORE_BYTES + 1 :]):
        key = key + lax.shift_left(x, jnp.int32(LANE_BITS + n * BYTE_BITS))
    return score, key


def _place(positions: jax.Array, pieces: Sequence[jax.Array], spec: IndexerDecodeSpec) -> jax.Array:
    """Returns some bytes at their positions, [bytes rows of a list, 128]; those of position -1 are left out.

    Args:
        positions: int32 [8, 128].
        pieces: The bytes, float32 [8, 128] each.
        spec: The kernel's constants.
    """
    list_row = lax.broadcasted_iota(jnp.int32, (spec.list_rows, LANES), 0)
    list_lane = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    high = lax.shift_right_arithmetic(positions, jnp.int32(LANE_BITS))
    low = positions & (LANES - 1)
    values, one_hots = [], []
    for row in range(SUBLANES):
        has_high = list_row == high[row : row + 1]
        values.append(jnp.concatenate([jnp.where(has_high, x[row : row + 1], 0.0) for x in pieces]))
        one_hots.append(jnp.where(list_lane == low[row : row + 1], 1.0, 0.0))
    value, one_hot = (jnp.concatenate(x, axis=1).astype(jnp.bfloat16) for x in (values, one_hots))
    return matrix_product(value, one_hot, (1, 1), lax.Precision.DEFAULT)


def _store_score_column(refs: IndexerDecodeRefs, row: Any) -> None:
    column = pl.ds(pl.multiple_of(row * LANES, LANES), LANES)
    refs.score_columns[column, :] = row_to_column(refs.list_scores[pl.ds(row, 1), :])


def _store_position(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, row: Any, num_selected: Any) -> None:
    """Stores the positions in descending order of a row of the list."""
    scores = refs.list_scores[pl.ds(row, 1), :]
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def add(counts: jax.Array, is_first: jax.Array) -> jax.Array:
        return counts + jnp.sum(jnp.where(is_first, 1, 0).reshape(-1, SUBLANES, LANES), axis=0)

    def column(other: Any) -> jax.Array:
        return refs.score_columns[pl.ds(pl.multiple_of(other * LANES, LANES), LANES), :]

    counts = jnp.zeros((SUBLANES, LANES), jnp.int32)
    counts = fori_loop(0, row, lambda n, counts: add(counts, column(n) >= scores), counts)
    counts = fori_loop(row + 1, spec.list_rows, lambda n, counts: add(counts, column(n) > scores), counts)
    diagonal = column(row)
    is_before = lax.broadcasted_iota(jnp.int32, diagonal.shape, 0) < lax.broadcasted_iota(jnp.int32, diagonal.shape, 1)
    counts = add(counts, (diagonal > scores) | ((diagonal == scores) & is_before))
    is_key = row * LANES + lane < num_selected
    position = jnp.where(is_key, jnp.sum(counts, axis=0, keepdims=True), -1)
    refs.list_positions[pl.ds(row, 1), :] = position
