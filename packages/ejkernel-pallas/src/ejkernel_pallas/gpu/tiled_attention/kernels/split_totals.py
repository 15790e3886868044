"""Folds finished splits of keys in the forward kernel; without splits, nothing of it is in the program.

    block     0   1  ...  7 |  8  ...                  8 blocks per split
    acc       0 ...   P V   |  fold into the total in shared memory, then alpha = 0 clears it
    row max   -1e38 ...     | -1e38 ...                a split begins like a tile

Registers have no room for a second accumulator of 128 columns. The total is in shared memory of the threads that own
its numbers, so that a fold needs no barrier. The first split is written without a read, the last one read without a
write; then the output is written through the memory of the total.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, fixed_splits
from ejkernel_pallas.gpu.hopper.fixed_splits import RowTotals
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels import online_softmax
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call
from ejkernel_pallas.gpu.tiled_attention.spec import INITIAL_ROW_MAX, HopperSpec


class FoldedSplits(NamedTuple):
    """What has been folded.

    Attributes:
        count: Splits, int32. The total is in shared memory if there are any.
        rows: Their maxima and sums.
    """

    count: Any
    rows: RowTotals


def empty_totals(spec: HopperSpec) -> FoldedSplits | None:
    """Returns the totals of no split; None without splits."""
    if not spec.blocks_per_split:
        return None
    rows = RowTotals(arrays.fill_row_vector(WGMMA_M, INITIAL_ROW_MAX), arrays.fill_row_vector(WGMMA_M, 0.0))
    return FoldedSplits(I32(0), rows)


def rows_before_block(begins: Any, row_max: Any, row_sum: Any) -> tuple[Any, Any]:
    """Returns the maximum and sum before a key block: the initial ones if a split begins with it, an array or a
    constant.
    """
    if begins is False:
        return row_max, row_sum
    if begins is True:
        return arrays.fill_row_vector(WGMMA_M, INITIAL_ROW_MAX), arrays.fill_row_vector(WGMMA_M, 0.0)
    return jnp.where(begins, INITIAL_ROW_MAX, row_max), jnp.where(begins, 0.0, row_sum)


def fold_finished_split(
    call: Call, begins: Any, acc: jax.Array, state: Any, alpha: jax.Array
) -> tuple[FoldedSplits | None, jax.Array]:
    """Returns the totals before a key block, and the factor of the accumulator. If a split begins with the block, the
    previous split is folded, and the factor is 0.

    Args:
        call: The launch.
        begins: Whether a split begins with the key block, an array or a constant.
        acc: The accumulator, with the products of all earlier blocks of the previous split.
        state: The consumer's state before the block.
        alpha: The factor from the block's maxima, which is 1 for rows that attend to nothing in it.
    """
    if state.totals is None or begins is False:
        return state.totals, alpha
    count, rows = state.totals

    def fold() -> tuple[Any, ...]:
        row_sum = online_softmax.reduce_row_sum(state.row_sum)
        totals, weights = fixed_splits.fold_rows(rows, state.row_max, row_sum)
        for is_first in (True, False):
            fold_tile = functools.partial(fixed_splits.fold_into_thread_tile, _total(call), acc, weights, is_first)
            pl.when((count == 0) == is_first)(fold_tile)
        return count + 1, *totals

    if begins is True:
        count, *totals = fold()
        return FoldedSplits(count, RowTotals(*totals)), alpha * 0.0
    count, *totals = lax.cond(begins, fold, lambda: (count, *rows))
    return FoldedSplits(count, RowTotals(*totals)), jnp.where(begins, 0.0, alpha)


def add_last_split(call: Call, state: Any) -> Any:
    """Returns the state at the end of a tile with the totals of all splits; as it is without splits."""
    if state.totals is None:
        return state
    (count, rows), row_sum = state.totals, online_softmax.reduce_row_sum(state.row_sum)
    totals, weights = fixed_splits.fold_rows(rows, state.row_max, row_sum)
    acc = lax.cond(
        count == 0,
        lambda: fixed_splits.fold_tiles(arrays.zero_tile(state.acc.shape), state.acc, weights),
        lambda: fixed_splits.folded_thread_tile(_total(call), state.acc, weights),
    )
    # Other threads' numbers may be overwritten with the output from here on.
    fixed_splits.synchronize_warpgroup()
    return state._replace(acc=acc, totals=FoldedSplits(count, totals))


def begins_split(call: Call, block: Any) -> Any:
    """Returns whether a split begins with a key block; False without splits."""
    return bool(call.spec.blocks_per_split) and call.spec.split_boundaries.begins(block)


def _total(call: Call) -> Any:
    """Returns the memory of this warpgroup's total."""
    return call.shared.split_totals.at[lax.axis_index("warpgroup")]
