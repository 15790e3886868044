"""Folds the splits of items that several programs have, in the order of splits, in a separate kernel.

Program p has the splits of an item that are in its share; the first program of an item stores them in its second
segment of slots, the others in their first. A block has some rows of the item that is cut where a program's share
begins, and a thread a column: loads of many splits are in flight at a time.

    segments of programs   [first, second] [first, second] [first, second]
    splits of an item              0, 1 ─► 2, 3, 4 ──────► 5               folded one after the other
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.gpu.hopper import fixed_splits, thread_columns
from ejkernel_pallas.gpu.hopper.fixed_splits import RowTotals
from ejkernel_pallas.gpu.hopper.in_place import update_in_place
from ejkernel_pallas.gpu.hopper.sizes import I32, THREADS_PER_WARPGROUP, WGMMA_M
from ejkernel_pallas.gpu.hopper.thread_columns import COLUMN_PER_THREAD
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.paged_attention.kernels.producer import item_rows
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec
from ejkernel_pallas.gpu.tiled_attention.spec import INITIAL_ROW_MAX

LOADS_IN_FLIGHT = 16
"""Numbers of splits that a thread loads before it folds the first of them."""
MAX_VECTORS_PER_BLOCK = 4
"""The most vectors of rows that a block folds at a time."""


def combine_splits(
    spec: PagedSpec, schedule: LatentSchedule, outputs: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns output [rows, Dv] and lse [rows] of all items, in place or in tiles of 64 rows per item and KV head.

    Args:
        spec: Constants.
        schedule: Items and shares, in splits.
        outputs: The kernel's outputs: of items that one program has, and of the splits of the others.
    """
    output, lse, *splits = outputs
    lse, boundaries = lse.reshape(-1), spec.programs_per_kv_head - 1
    if spec.slots_per_segment and not spec.folds_in_launch and boundaries:
        names = ("parts", "part_max", "part_sum", "items", "shares")
        arrays_read = (*splits, schedule.items, schedule.program_starts)
        operands: dict[str, jax.Array] = dict(zip(names, arrays_read, strict=True))
        vectors = cdiv(rows_per_item(spec), rows_per_vector(spec))
        per_block = vectors_per_block(vectors)
        blocks_per_tile = vectors // per_block

        def body(operand_refs: dict[str, Any], updated_refs: dict[str, Any]) -> None:
            block = lax.axis_index("block")
            tile, number = (f(block, I32(blocks_per_tile)) for f in (lax.div, lax.rem))
            boundary, head = lax.div(tile, I32(spec.tiles_per_item)), lax.rem(tile, I32(spec.tiles_per_item))
            fold_item_cut_at(spec, operand_refs, updated_refs, (boundary + 1, head), number * per_block, per_block)

        num_blocks = boundaries * spec.tiles_per_item * blocks_per_tile
        updated = update_in_place(body, operands, {"output": output, "lse": lse}, num_blocks)
        output, lse = updated["output"], updated["lse"]
    return output, lse


def vectors_per_block(vectors: int) -> int:
    """Returns how many of the vectors of rows of a tile a block folds, a divisor of them: one of a single token's, and
    several of a chunk's, so that all blocks run at the same time.
    """
    most = max(1, min(MAX_VECTORS_PER_BLOCK, vectors // 16))
    return next(n for n in range(most, 0, -1) if vectors % n == 0)


class CutItem(NamedTuple):
    """An item that several programs have, int32.

    Attributes:
        start: Its first unit in the order of all units.
        first_unit: Its first unit in its sequence.
        share: Units per program, before shares are rounded up to whole splits.
    """

    start: Any
    first_unit: Any
    share: Any


def slot_of_split(spec: PagedSpec, item: CutItem, number: Any, head: Any) -> Any:
    """Returns the slot in which the kernel stores a split of an item that is cut.

    Args:
        spec: Constants.
        item: The item.
        number: Index of the split in the item.
        head: KV head.
    """
    splits, (start, first_unit, share) = spec.splits, item
    first_split = splits.index(first_unit)
    # The item's first split may begin before its first unit.
    unit = jnp.maximum(splits.first_unit(first_split + number), first_unit)
    program = lax.div(start + unit - first_unit, share)
    segment = program * 2 + (program == lax.div(start, share)).astype(I32)
    # The program's first split of the item: the next one from the unit with which its share begins.
    before_share = program * share - start + first_unit - 1
    first_of_program = jnp.where(program * share > start, splits.index(jnp.maximum(before_share, 0)) + 1, first_split)
    number_in_segment = first_split + number - first_of_program
    return (segment * spec.slots_per_segment + number_in_segment) * spec.tiles_per_item + head


def rows_per_item(spec: PagedSpec) -> int:
    """Returns the rows of an item and KV head that are folded."""
    return spec.heads_per_tile if spec.queries_in_place else spec.slot_rows


def rows_per_vector(spec: PagedSpec) -> int:
    """Returns the rows whose columns the threads of a warpgroup have."""
    return THREADS_PER_WARPGROUP // spec.value_dim


def fold_item_cut_at(
    spec: PagedSpec,
    operands: dict[str, Any],
    updated_refs: dict[str, Any],
    boundary_and_head: tuple[Any, Any],
    first_vector: Any,
    num_vectors: int,
) -> None:
    """Folds some rows of the item within which a program's share begins, if no earlier share begins within it."""
    (program, head), (items, shares) = boundary_and_head, (operands[name] for name in ("items", "shares"))
    begin, item = shares[program, 1], shares[program, 0]
    start, num_units = items[item, 2], items[item, 3]
    is_first_cut = shares[program - 1, 1] <= start

    @pl.when((start < begin) & (begin < start + num_units) & is_first_cut)
    def _fold() -> None:
        fold_item_rows(spec, operands, updated_refs, (item, head), first_vector, num_vectors)


def fold_item_rows(
    spec: PagedSpec,
    operands: dict[str, Any],
    updated_refs: dict[str, Any],
    item_and_head: tuple[Any, Any],
    first_vector: Any,
    num_vectors: int,
) -> None:
    """Folds all splits of some rows of an item that is cut, and writes output and lse.

    Args:
        spec: Constants.
        operands: References to splits, items and shares.
        updated_refs: References to output and lse.
        item_and_head: Item and KV head.
        first_vector: The first rows, in units of `rows_per_vector`.
        num_vectors: Units of rows.
    """
    (item, head), items = item_and_head, operands["items"]
    # As in the plan: all programs have equal shares, before they are rounded up to whole splits.
    total, programs = operands["shares"][spec.programs_per_kv_head, 1], spec.programs_per_kv_head
    share = jnp.maximum(lax.div(total + (programs - 1), I32(programs)), 1)
    first_unit, num_units = lax.div(items[item, 4], I32(spec.keys_per_unit)), items[item, 3]
    cut_item = CutItem(items[item, 2], first_unit, share)
    num_splits = spec.splits.index(first_unit + num_units - 1) - spec.splits.index(first_unit) + 1
    width = min(rows_per_vector(spec), rows_per_item(spec))
    # The row of the item's tile, and of the outputs, to which the first folded row belongs.
    row, first_output_row = I32(0), (item * spec.tiles_per_item + head) * WGMMA_M
    if spec.queries_in_place:
        aligned, row = item_rows(spec, items[item, 6], head)
        first_output_row = aligned + row
    rows = [(first_vector + n) * width for n in range(num_vectors)]
    splits_per_step = max(1, LOADS_IN_FLIGHT // num_vectors)

    def load(number: Any, offset: Any) -> tuple[Any, ...]:
        slot = slot_of_split(spec, cut_item, jnp.minimum(number, num_splits - 1), head)
        tile = operands["parts"].at[pl.ds(slot * spec.slot_rows + row + offset, width), :]
        sums = (operands[name].at[slot, pl.ds(row + offset, width)] for name in ("part_max", "part_sum"))
        return thread_columns.load_matrix(tile), *(thread_columns.load_rows(x, spec.value_dim) for x in sums)

    def add_splits(step: Any, carry: Any) -> Any:
        numbers, totals = [step * splits_per_step + n for n in range(splits_per_step)], list(carry)
        loaded = [[load(number, offset) for offset in rows] for number in numbers]
        for number, splits in zip(numbers, loaded, strict=True):
            for n, split in enumerate(splits):
                folded = _fold_vector(totals[n], split)
                totals[n] = tuple(jnp.where(number < num_splits, x, y) for x, y in zip(folded, totals[n], strict=True))
        return tuple(totals)

    zero = thread_columns.fill(0.0)
    empty = (zero, thread_columns.fill(INITIAL_ROW_MAX), zero)
    steps = lax.div(num_splits + (splits_per_step - 1), I32(splits_per_step))
    for offset, (total, *row_totals) in zip(
        rows, lax.fori_loop(0, steps, add_splits, (empty,) * num_vectors), strict=True
    ):
        totals, target = RowTotals(*row_totals), pl.ds(first_output_row + offset, width)
        output = total * fixed_splits.output_scale(totals, spec.value_scale)
        thread_columns.store_matrix(updated_refs["output"].at[target, :], output.astype(spec.dtype))
        lse = fixed_splits.log_sum_exp(totals, COLUMN_PER_THREAD)
        thread_columns.store_rows(updated_refs["lse"].at[target], lse, spec.value_dim)


def _fold_vector(carry: tuple[Any, ...], split: tuple[Any, ...]) -> tuple[Any, ...]:
    total, *rows = carry
    column, row_max, row_sum = split
    totals, weights = fixed_splits.fold_rows(RowTotals(*rows), row_max, row_sum, COLUMN_PER_THREAD)
    return fixed_splits.multiply_add(total, column, weights, COLUMN_PER_THREAD), *totals
