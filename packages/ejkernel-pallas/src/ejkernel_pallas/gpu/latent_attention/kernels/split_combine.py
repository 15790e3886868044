"""Merges the partial results of items that were split over several programs, in a separate kernel.

A block has 64 heads and `COLUMNS_PER_STAGE` columns of one item. The programs of an item are consecutive: the first one
wrote its second slot, all others their first. Items of a single program are not touched.

    slots of programs   [first, second] [first, second] [first, second]
    an item's parts             part 0 ─► part 1 ──────► part 2           online softmax over parts, weight exp(lse)
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns
from ejkernel_pallas.gpu.hopper.in_place import update_in_place
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.latent_attention.spec import MASKED_SCORE, ScheduledSpec

COLUMNS_PER_STAGE = 64
"""Columns that a thread block merges at a time."""
TARGET_THREAD_BLOCKS = 528
"""The approximate number of thread blocks: four per multiprocessor."""


@dataclasses.dataclass(frozen=True)
class KernelOutputs:
    """The outputs of the latent kernel, or of one with the same schedule. W columns: 512, or the value dimension.

    Attributes:
        output: [T * tiles * 64, W] of items of a single program.
        lse: [T * tiles, 64] of the same items.
        partial_outputs: [programs * 2 * tiles, 64, W] float32, partial results of the other items.
        partial_lse: [programs * 2 * tiles, 64], their lse.
    """

    output: Any
    lse: Any
    partial_outputs: Any
    partial_lse: Any


def combine_partial_results(
    spec: ScheduledSpec, schedule: LatentSchedule, outputs: KernelOutputs, num_stored_rows: int = WGMMA_M
) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, H, W] and lse [T, H] of all items.

    Args:
        spec: Constants.
        schedule: Items and shares.
        outputs: The kernel's outputs.
        num_stored_rows: The number of leading rows of a tile that it wrote.
    """
    operands = {
        "parts": outputs.partial_outputs,
        "part_lse": outputs.partial_lse,
        "items": schedule.items,
        "shares": schedule.program_starts,
    }
    width = outputs.output.shape[1]
    column_blocks = width // COLUMNS_PER_STAGE
    # Blocks with nothing to merge cost little, but not nothing: with many tiles each block has more columns.
    while column_blocks % 2 == 0 and spec.num_items * spec.tiles_per_item * column_blocks > TARGET_THREAD_BLOCKS:
        column_blocks //= 2

    def body(operand_refs: dict[str, Any], updated_refs: dict[str, Any]) -> None:
        block = lax.axis_index("block")
        tile, column_block = lax.div(block, I32(column_blocks)), lax.rem(block, I32(column_blocks))
        _merge_item_columns(
            spec,
            operand_refs,
            updated_refs,
            tile,
            (column_block * width // column_blocks, width // column_blocks),
            num_stored_rows,
        )

    results = {"output": outputs.output, "lse": outputs.lse}
    results = update_in_place(body, operands, results, spec.num_items * spec.tiles_per_item * column_blocks)
    output, lse = results["output"], results["lse"]
    output = output.reshape(spec.num_items, spec.tiles_per_item * WGMMA_M, width)[:, : spec.stored_rows_per_item]
    return output, lse.reshape(spec.num_items, spec.tiles_per_item * WGMMA_M)[:, : spec.stored_rows_per_item]


def _merge_item_columns(
    spec: ScheduledSpec,
    operands: dict[str, Any],
    updated_refs: dict[str, Any],
    tile_index: Any,
    column_range: tuple[Any, int],
    num_stored_rows: int,
) -> None:
    """Merges columns of one tile of heads of an item; `column_range` is the first column and their number."""
    item, tile = lax.div(tile_index, I32(spec.tiles_per_item)), lax.rem(tile_index, I32(spec.tiles_per_item))
    start, steps = operands["items"][item, 2], operands["items"][item, 3]
    # All programs have equal shares, except the last ones: program 1 starts where the first share ends.
    steps_per_program = jnp.maximum(operands["shares"][1, 1], 1)
    first, last = lax.div(start, steps_per_program), lax.div(start + steps - 1, steps_per_program)
    rows = pl.ds(tile_index * WGMMA_M, WGMMA_M)

    def merge_columns(stage: Any, carry: Any) -> Any:
        column = column_range[0] + stage * COLUMNS_PER_STAGE
        columns = pl.ds(column, COLUMNS_PER_STAGE)

        def partial_result_slot(program: Any) -> Any:
            return (program * 2 + (program == first).astype(I32)) * spec.tiles_per_item + tile

        def load_partial_result(program: Any) -> tuple[Any, Any]:
            # With an odd number of partial results, the last is loaded twice, the second time with a weight of 0.
            slot_index = partial_result_slot(jnp.minimum(program, last))
            partial_lse = arrays.load_row_vector(operands["part_lse"].at[slot_index])
            partial_output = arrays.load_first_rows(operands["parts"].at[slot_index, :, columns], num_stored_rows)
            return jnp.where(program <= last, partial_lse, MASKED_SCORE), partial_output

        def add_two_partials(pair_index: Any, state: Any) -> Any:
            output, row_max, row_sum = state
            # Two at a time, so that all their loads are in flight together.
            partials = [load_partial_result(first + 2 * pair_index + n) for n in (0, 1)]
            new_max = jnp.maximum(row_max, jnp.maximum(partials[0][0], partials[1][0]))
            alpha = jnp.exp(row_max - new_max)
            output, row_sum = output * broadcast_to_columns(alpha, output.shape), row_sum * alpha
            for partial_lse, partial_output in partials:
                # A partial result is normalised by its own denominator, so its weight is exp(lse). Their order is
                # fixed: results are reproducible bit for bit.
                partial_weight = jnp.exp(partial_lse - new_max)
                output, row_sum = (
                    output + partial_output * broadcast_to_columns(partial_weight, partial_output.shape),
                    row_sum + partial_weight,
                )
            return output, new_max, row_sum

        zeros = (
            arrays.zero_tile((WGMMA_M, COLUMNS_PER_STAGE)),
            arrays.fill_row_vector(WGMMA_M, MASKED_SCORE),
            arrays.fill_row_vector(WGMMA_M, 0.0),
        )
        output, row_max, row_sum = lax.fori_loop(0, lax.div(last - first + 2, I32(2)), add_two_partials, zeros)
        output = output * broadcast_to_columns(1 / row_sum, output.shape)
        arrays.store_first_rows(updated_refs["output"].at[rows, columns], output.astype(spec.dtype), num_stored_rows)

        @pl.when(column == 0)
        # All blocks of columns compute lse; the first writes it.
        def _lse() -> None:
            updated_refs["lse"][tile_index] = row_max + jnp.log(row_sum)

        return carry

    # Items of a single program are complete.
    @pl.when(first != last)
    def _merge_if_split() -> None:
        lax.fori_loop(0, column_range[1] // COLUMNS_PER_STAGE, merge_columns, I32(0))
