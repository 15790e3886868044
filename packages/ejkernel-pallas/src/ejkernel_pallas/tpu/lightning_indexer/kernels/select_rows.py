"""The selection of the K largest scores of each query, which moves them to the first rows.

A row is a key and a lane a query. In three steps, each a pass or several over the rows:

1. The K-th largest score t of each lane, one bit after the other, by counting the scores that are at least as large.
2. What is selected: scores above t and, in order of keys, as many equal to t as are left to K. Products with a
   triangular matrix count the selected rows before each one: the rank r, and with it the rows p - r to move.
3. The moves, by powers of two, the lowest bit first. Ranks are consecutive, so no two rows move to the same one.

A packed index has the key in its upper bits, and the rows to move in its lower ones; a move clears its bit. The copy
that stays at the old row still has the bit set, and never moves again, because the lower bits of what moves are 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.lightning_indexer.config import KEYS_PER_PRODUCT
from ejkernel_pallas.tpu.lightning_indexer.kernels.ordered_scores import NOT_SELECTABLE
from ejkernel_pallas.tpu.lightning_indexer.kernels.refs import IndexerRefs
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product

SCORE_BITS = 32
MAX_COUNTED_ROWS = 512
"""Rows that are counted in a step of a loop."""


def select_rows(refs: IndexerRefs, spec: IndexerSpec, num_rows: Any, first_key: Any) -> None:
    """Moves the selected of the first `num_rows` rows to the first ones; the others there are not selectable.

    Args:
        refs: The kernel's refs. The rows up to `kept_rows` hold what was selected before.
        spec: Its constants.
        num_rows: Rows, a multiple of 128.
        first_key: The key of row `kept_rows`; those of the next rows follow.
    """
    threshold = _kth_largest(refs, spec, num_rows)
    num_selected = _pack_moves(refs, spec, num_rows, first_key, threshold)
    # The rows that the last ones look at.
    refs.packed_indices[pl.ds(pl.multiple_of(num_rows, LANES), LANES), :] = jnp.zeros((LANES, LANES), jnp.int32)
    for bit in range(SUBLANES.bit_length() - 1):
        _move(refs, spec, num_rows, bit)
    first_whole = SUBLANES.bit_length() - 1
    fori_loop(first_whole, spec.shift_bits, lambda bit, carry: _move(refs, spec, num_rows, bit), None)
    _mask_rows_after(refs, spec, num_selected)


def key_indices(packed: jax.Array, spec: IndexerSpec) -> jax.Array:
    """Returns the keys of packed indices."""
    return lax.shift_right_logical(packed, jnp.int32(spec.shift_bits))


def _for_each_block(num_rows: Any, size: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Returns the carry after all blocks of rows; `body` gets the first row of each."""
    num_blocks = lax.div(jnp.int32(num_rows), jnp.int32(size))
    return fori_loop(0, num_blocks, lambda n, carry: body(pl.multiple_of(n * size, size), carry), carry)


def _kth_largest(refs: IndexerRefs, spec: IndexerSpec, num_rows: Any) -> jax.Array:
    """Returns the K-th largest ordered score of each lane, [1, 128]; the least integer if fewer are selectable."""

    def try_bit(n: Any, threshold: jax.Array) -> jax.Array:
        bit = lax.shift_left(jnp.int32(1), jnp.int32(SCORE_BITS - 1) - n)
        larger = threshold ^ bit  # the first bit is that of the sign, which is set in smaller numbers
        count = _count(refs, spec, num_rows, larger)
        return jnp.where(count >= spec.top_k, larger, threshold)

    return fori_loop(0, SCORE_BITS, try_bit, jnp.full((1, LANES), NOT_SELECTABLE, jnp.int32))


def _count(refs: IndexerRefs, spec: IndexerSpec, num_rows: Any, threshold: jax.Array) -> jax.Array:
    """Returns the number of scores of each lane that are at least as large as a threshold, [1, 128]."""

    size = (
        KEYS_PER_PRODUCT if spec.kept_rows % MAX_COUNTED_ROWS or spec.block_k % MAX_COUNTED_ROWS else MAX_COUNTED_ROWS
    )

    def add_block(row: Any, counts: jax.Array) -> jax.Array:
        is_larger = jnp.where(refs.ordered_scores[pl.ds(row, size), :] >= threshold, 1, 0)
        return counts + jnp.sum(is_larger.reshape(-1, SUBLANES, LANES), axis=0)

    counts = _for_each_block(num_rows, size, add_block, jnp.zeros((SUBLANES, LANES), jnp.int32))
    return jnp.sum(counts, axis=0, keepdims=True)


def _pack_moves(refs: IndexerRefs, spec: IndexerSpec, num_rows: Any, first_key: Any, threshold: Any) -> jax.Array:
    """Stores the packed index of every row, 0 for one that is not selected; returns how many are, [1, 128] float32."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    before = jnp.where(column < row, 1.0, 0.0).astype(jnp.bfloat16)
    num_larger = _count(refs, spec, num_rows, threshold + 1)  # no score is the largest integer and below another
    num_larger = jnp.where(threshold == 2**31 - 1, 0, num_larger)
    num_ties = (spec.top_k - num_larger).astype(jnp.float32)

    def ranks(selected: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts = jnp.where(selected, 1.0, 0.0)
        rank = earlier + matrix_product(before, counts.astype(jnp.bfloat16), (1, 0), lax.Precision.DEFAULT)
        return rank, rank[LANES - 1 :] + counts[LANES - 1 :]

    def pack(start: Any, earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows = pl.ds(start, LANES)
        in_order = refs.ordered_scores[rows, :]
        is_tie = (in_order == threshold) & (in_order > NOT_SELECTABLE)
        tie_rank, ties = ranks(is_tie, earlier[0])
        selected = (in_order > threshold) | (is_tie & (tie_rank < num_ties))
        rank, total = ranks(selected, earlier[1])
        position = start + row
        new_key = first_key - spec.kept_rows + position
        key = jnp.where(start < spec.kept_rows, key_indices(refs.packed_indices[rows, :], spec), new_key)
        packed = lax.shift_left(key, jnp.int32(spec.shift_bits)) | (position - rank.astype(jnp.int32))
        refs.packed_indices[rows, :] = jnp.where(selected, packed, 0)
        return ties, total

    zeros = jnp.zeros((1, LANES), jnp.float32)
    return _for_each_block(num_rows, LANES, pack, (zeros, zeros))[1]


def _move(refs: IndexerRefs, spec: IndexerSpec, num_rows: Any, bit: Any) -> None:
    """Moves the rows whose lowest bit is `bit` by that power of two."""
    distance = lax.shift_left(jnp.int32(1), jnp.int32(bit))
    static_distance = 1 << bit if isinstance(bit, int) else None
    low_bits = 2 * distance - 1
    # Then rows are final up to multiples of the next power of two, of which only the first `kept_rows` rows matter.
    bit_of_block = LANES.bit_length() - 1
    period_bit = jnp.maximum(jnp.int32(bit) + 1, bit_of_block)
    kept_bit = jnp.minimum(period_bit, spec.kept_rows.bit_length() - 1)
    period = lax.shift_left(jnp.int32(1), period_bit)
    num_periods = lax.shift_right_logical(num_rows - jnp.minimum(distance, num_rows) + period - 1, period_bit)

    def move_block(n: Any, carry: None) -> None:
        row = n * LANES
        row_of_period = row & (lax.shift_left(jnp.int32(1), kept_bit) - 1)
        start = lax.shift_left(lax.shift_right_logical(row, kept_bit), period_bit) + row_of_period
        start = pl.multiple_of(start, LANES)
        if static_distance is None:
            source = pl.ds(pl.multiple_of(jnp.minimum(start + distance, num_rows), SUBLANES), LANES)
        else:
            source = pl.ds(start + static_distance, LANES)
        rows = pl.ds(start, LANES)
        packed = refs.packed_indices[source, :]
        moves = (packed & low_bits) == distance
        refs.packed_indices[rows, :] = jnp.where(moves, packed - distance, refs.packed_indices[rows, :])
        refs.ordered_scores[rows, :] = jnp.where(moves, refs.ordered_scores[source, :], refs.ordered_scores[rows, :])

    fori_loop(0, lax.shift_left(num_periods, kept_bit - bit_of_block), move_block, None)


def _mask_rows_after(refs: IndexerRefs, spec: IndexerSpec, num_selected: jax.Array) -> None:
    """Makes the first rows after those that are selected not selectable."""

    def mask_block(start: Any, carry: None) -> None:
        rows = pl.ds(start, LANES)
        position = start + lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
        is_key = position < num_selected.astype(jnp.int32)
        refs.ordered_scores[rows, :] = jnp.where(is_key, refs.ordered_scores[rows, :], NOT_SELECTABLE)

    _for_each_block(spec.kept_rows, LANES, mask_block, None)
