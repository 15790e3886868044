"""Products of 8-bit rows and matrices with scales: a float32 sum per 128 contracted elements.

    tensor cores     | WG 0, columns 0.. | WG 1, columns 0.. | WG 0, columns BP.. | WG 1 ...
    warpgroup 0      issue, wait ........| scale and add ....| issue, wait .......| scale ...
    warpgroup 1      ....................| issue, wait ......| scale and add .....| ...

The tensor cores sum 8-bit products with about 14 bits, and the scales of a block apply only to its own product. So a
warpgroup's 64 rows have two accumulators: the tile's sums, and the product of a step with some of the columns. While
one warpgroup scales its product, the other's product runs.

In addition to its products a step costs one addition per element if all blocks share a scale; a fused multiply-add if
the columns of a product share theirs; else another multiplication, and loads of all columns' scales from the shared
memory that tensor cores read operands from.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS, SCALE_BLOCKS_PER_COPY, ScaleConstants
from ejkernel_pallas.gpu.hopper import arrays, wgmma
from ejkernel_pallas.gpu.hopper.scaled_sums import (
    add_scaled_product,
    load_row_scales_from_hbm,
    load_row_scales_from_smem,
    load_scale_for_all_rows,
)
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


class StepScalePosition(NamedTuple):
    """The position of a step's column scales: matrix, first column, the step, and the steps of all earlier tiles."""

    matrix: Any
    first_column: Any
    step_in_tile: Any
    steps_done: Any


class WarpgroupRows(NamedTuple):
    """A warpgroup's rows: indices of its parts of 64 rows, the first row of each, and the steps of all earlier
    tiles.
    """

    row_block_indices: tuple[Any, ...]
    first_rows: tuple[Any, ...]
    steps_done: Any


def copy_scales(
    call: Call, scale_constants: ScaleConstants, scale_position: StepScalePosition, first_rows: list[Any]
) -> None:
    """Copies the scales of a step's columns and, if rows' scales are copied, those of its rows from `first_rows` on."""
    block, columns = (
        _scale_block_index(call, scale_constants.rhs_scale_blocks, scale_position.step_in_tile),
        pl.ds(scale_position.first_column, call.spec.tile.block_n),
    )
    shared, stage = call.shared_memory, lax.rem(scale_position.steps_done, I32(call.spec.tile.stages))
    target = shared.column_scales.at[_scale_slot(call, scale_position.steps_done)]
    plgpu.copy_gmem_to_smem(
        call.operands["rhs_scale"].at[scale_position.matrix, block, columns], target, shared.operands_full.at[stage]
    )
    if not scale_constants.copies_row_scales:
        return
    blocks_per_copy = I32(SCALE_BLOCKS_PER_COPY)
    blocks = pl.ds(
        lax.div(
            _scale_block_index(call, scale_constants.lhs_scale_blocks, scale_position.step_in_tile), blocks_per_copy
        )
        * blocks_per_copy,
        SCALE_BLOCKS_PER_COPY,
    )
    for part, first in enumerate(first_rows):
        source = call.operands["lhs_scale"].at[pl.ds(first, WGMMA_M), blocks]
        plgpu.copy_gmem_to_smem(source, shared.row_scales.at[stage, part], shared.operands_full.at[stage])


def sum_scaled_products(
    call: Call, scale_constants: ScaleConstants, rows: WarpgroupRows, sub_tile: SubTile
) -> list[jax.Array]:
    """Returns sums over all steps: [64, product_n] for each part of the columns, or for each part of the rows."""
    if scale_constants.rhs_scale_blocks == 1:
        unscaled_sums = _sum_over_steps(call, scale_constants, rows, sub_tile, columns_share_scales=False)
    else:
        # Two loops, since the fast one has no registers left for a choice per step.
        loops = [
            lambda same=same: tuple(_sum_over_steps(call, scale_constants, rows, sub_tile, columns_share_scales=same))
            for same in (True, False)
        ]
        unscaled_sums = lax.cond(call.columns_share_scales, *loops)
    return apply_step_invariant_scales(call, scale_constants, list(unscaled_sums), rows, sub_tile.first_column)


def _sum_over_steps(
    call: Call, scale_constants: ScaleConstants, rows: WarpgroupRows, sub_tile: SubTile, *, columns_share_scales: bool
) -> list[jax.Array]:
    """Sums without the scales that all blocks share; with `columns_share_scales`, the columns of a product share
    theirs.
    """
    spec, shared, size = call.spec, call.shared_memory, scale_constants.product_n
    products = [
        (row, start) for start in range(0, sub_tile.num_columns, size) for row in range(len(rows.row_block_indices))
    ]

    def load_row_scales(step: Any) -> tuple[jax.Array, ...]:
        if scale_constants.lhs_scale_blocks == 1 or scale_constants.copies_row_scales:
            return ()
        block = _scale_block_index(call, scale_constants.lhs_scale_blocks, jnp.minimum(step, spec.steps_per_tile - 1))
        return tuple(load_row_scales_from_hbm(call.operands["lhs_scale"], first, block) for first in rows.first_rows)

    def step(index: Any, carry: Any) -> Any:
        old_sums, row_factors = carry
        steps_done = rows.steps_done + index
        slot, scales = lax.rem(steps_done, I32(spec.tile.stages)), _scale_slot(call, steps_done)
        # Prefetched: a load takes as long as a product, since copies keep the memory busy and the L1 cache is small.
        next_scales = load_row_scales(index + 1)
        plgpu.barrier_wait(shared.operands_full.at[slot])
        new_sums: list[jax.Array] = []
        for (row, start), acc in zip(products, old_sums, strict=True):
            number = rows.row_block_indices[row]
            if scale_constants.copies_row_scales:
                block = lax.rem(
                    _scale_block_index(call, scale_constants.lhs_scale_blocks, index), I32(SCALE_BLOCKS_PER_COPY)
                )
                factors = [load_row_scales_from_smem(shared.row_scales.at[slot, number], block)]
            else:
                factors = [row_factors[row]] if row_factors else []
            step_product = wgmma.issue_scores(
                shared.a.at[slot * CONSUMER_WARPGROUPS + number], _rhs_operand(call, sub_tile, slot, pl.ds(start, size))
            )
            columns = None
            if scale_constants.rhs_scale_blocks > 1:
                columns = shared.column_scales.at[scales, pl.ds(sub_tile.first_column + start, size)]
            if columns_share_scales:
                factors, columns = [*factors, load_scale_for_all_rows(columns)], None
            factor = factors[0] * factors[1] if len(factors) > 1 else next(iter(factors), None)
            step_product = wgmma.wait_for_products(step_product, max_in_flight=0)
            if len(new_sums) == len(old_sums) - 1:
                plgpu.barrier_arrive(shared.operands_free.at[slot])
            new_sums.append(add_scaled_product(acc, step_product, factor, columns))
        return tuple(new_sums), next_scales

    zeros = tuple(arrays.zero_tile((WGMMA_M, size)) for _ in products)
    return list(lax.fori_loop(0, spec.steps_per_tile, step, (zeros, load_row_scales(I32(0))))[0])


def _rhs_operand(call: Call, sub_tile: SubTile, slot: Any, columns: Any) -> Any:
    """Returns the right operand of some columns of a sub-tile."""
    if sub_tile.is_half_tile:
        return call.shared_memory.b_half_tiles.at[2 * slot, columns]
    return call.shared_memory.b.at[slot, pl.ds(sub_tile.first_column + columns.start, columns.size)]


def apply_step_invariant_scales(
    call: Call, scale_constants: ScaleConstants, accs: list[jax.Array], rows: WarpgroupRows, first_column: Any
) -> list[jax.Array]:
    """Returns sums times the scales that all steps share; those of columns are in the last step's slot."""
    if scale_constants.lhs_scale_blocks > 1 and scale_constants.rhs_scale_blocks > 1:
        return accs
    last, row_factors = rows.steps_done + (call.spec.steps_per_tile - 1), list[Any]([None] * len(rows.first_rows))
    if scale_constants.lhs_scale_blocks == 1:
        row_factors = [load_row_scales_from_hbm(call.operands["lhs_scale"], first, I32(0)) for first in rows.first_rows]
    scaled_sums: list[jax.Array] = []
    for number, acc in enumerate(accs):
        # Sums of one part of the columns and all parts of the rows, or the other way round.
        (column_part, row), columns, size = divmod(number, len(row_factors)), None, acc.shape[1]
        if scale_constants.rhs_scale_blocks == 1:
            columns = call.shared_memory.column_scales.at[
                _scale_slot(call, last), pl.ds(first_column + column_part * size, size)
            ]
        scaled_sums.append(add_scaled_product(None, acc, row_factors[row], columns))
    return scaled_sums


def _scale_slot(call: Call, steps_done: Any) -> Any:
    """Returns the slot of a step's scales in shared memory.

    There is one slot more than stages: the scales of a step are read when its stage is already free, and overwritten
    after the next stage.
    """
    return lax.rem(steps_done, I32(call.spec.tile.stages + 1))


def _scale_block_index(call: Call, num_scale_blocks: int, k_step: Any) -> Any:
    """Returns the block of contracted elements that a step is in."""
    return lax.div(k_step, I32(call.spec.steps_per_tile // num_scale_blocks))
