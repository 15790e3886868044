"""The producer warpgroup of the kernels of rows: copies rows, matrices and scales to shared memory, step by step.

    free stage -> rows of each warpgroup | columns of a matrix | their scales -> full stage

Contiguous rows are copied in bulk, gathered rows by copies of 16 bytes. The gate and the values of a gated matrix are
copied separately, in panels of 64 columns (module `panels`).
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels import panels, scaled_products, work_queue
from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatchingBranch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import OutputTile, has_at_most_64_rows, load_output_tile
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS
from ejkernel_pallas.gpu.hopper import clusters, row_gathers
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


class TileCopySelection(NamedTuple):
    """Selects the parts of a tile that its steps copy.

    Attributes:
        half_columns: Whether only half of the columns are copied.
        first_64_rows_only: Whether only the first 64 rows are copied.
    """

    half_columns: bool = False
    first_64_rows_only: bool = False


def copy_tile_steps(call: Call, first_group_tile_row: Any, num_tile_rows: Any, carry: Any) -> Any:
    """Copies all steps of a tile."""
    number, steps_done = carry
    tile, spec = load_output_tile(call, first_group_tile_row, num_tile_rows, number), call.spec
    first_rows = [tile.first_row_of_warpgroup(warpgroup) for warpgroup in range(CONSUMER_WARPGROUPS)]
    row_offsets = _gather_offsets(call, first_rows) if spec.gathers_rows else None
    requested_tile = work_queue.request_next_tile(call, number)

    def copy_all_steps(copy_selection: TileCopySelection) -> None:
        lax.fori_loop(
            0,
            spec.steps_per_tile,
            functools.partial(_copy_step, call, tile, first_rows, row_offsets, copy_selection),
            steps_done,
        )

    # One loop per kind: with a branch inside the loop, the copies' operands would be moved to uniform registers in
    # every step.
    branches = FirstMatchingBranch()
    if spec.may_split_last_tiles and not spec.activation_constants:
        branches.when(tile.column_half >= 0, functools.partial(copy_all_steps, TileCopySelection(half_columns=True)))
    first_64_rows_only = has_at_most_64_rows(call, tile)
    if first_64_rows_only is not None:
        branches.when(first_64_rows_only, functools.partial(copy_all_steps, TileCopySelection(first_64_rows_only=True)))
    branches.otherwise(functools.partial(copy_all_steps, TileCopySelection()))
    return work_queue.publish_next_tile(call, requested_tile, steps_done), steps_done + spec.steps_per_tile


def _copy_step(
    call: Call,
    tile: OutputTile,
    first_rows: list[Any],
    row_offsets: Any,
    copy_selection: TileCopySelection,
    k_step: Any,
    steps_done: Any,
) -> Any:
    """Copies a step once its stage is free."""
    spec, shared = call.spec, call.shared_memory
    slot = lax.rem(steps_done, I32(spec.tile.stages))
    # `steps_done` counts the steps of all tiles: the ring of stages continues into the next tile, whose first copies
    # overlap with the end of this one. The first round finds the stages free.
    pl.when(steps_done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.operands_free.at[slot]))
    k_slice = pl.ds(k_step * spec.contracted_per_step, spec.contracted_per_step)
    if row_offsets is None:
        _copy_rows(call, first_rows, copy_selection, k_slice, slot)
    else:
        row_gathers.copy_gathered_rows(
            call.operands["lhs"], row_offsets, k_step, shared.a.at[slot * CONSUMER_WARPGROUPS]
        )
    if spec.activation_constants:
        panels.copy_gate_panels(call, tile, k_step * spec.contracted_per_step, slot)
    else:
        _copy_matrix(call, tile, copy_selection, k_slice, slot)
    if spec.scale_constants:
        scaled_products.copy_scales(
            call,
            spec.scale_constants,
            scaled_products.StepScalePosition(tile.matrix_index, tile.first_column, k_step, steps_done),
            first_rows,
        )
    if row_offsets is not None:
        # One step later, so that copies of two steps are in flight.
        pl.when(steps_done > 0)(lambda: signal_gathered_rows(call, steps_done - 1, max_in_flight=1))
    return steps_done + 1


def signal_gathered_rows(call: Call, steps_done: Any, *, max_in_flight: int) -> None:
    """Signals that the gathered rows of a step have arrived; `max_in_flight` later steps may still be in flight."""
    row_gathers.wait_for_gathered_rows(max_in_flight)
    plgpu.barrier_arrive(call.shared_memory.operands_full.at[lax.rem(steps_done, I32(call.spec.tile.stages))])


def _gather_offsets(call: Call, first_rows: list[Any]) -> Any:
    """Returns the addresses of the tile's rows that each thread copies."""
    lhs, spec = call.operands["lhs"], call.spec
    return row_gathers.find_row_offsets(
        call.operands["indices"], first_rows, spec.contracted_size * spec.operand_dtype.itemsize, lhs.shape[0]
    )


def _copy_rows(call: Call, first_rows: list[Any], copy_selection: TileCopySelection, k_slice: Any, slot: Any) -> None:
    """Copies a step of each warpgroup's contiguous rows."""
    shared, full = call.shared_memory, call.shared_memory.operands_full.at[slot]
    axes = clusters.CLUSTER_AXIS if call.spec.tile.cluster_n > 1 else None  # each member reads one half for both
    for warpgroup, first in enumerate(first_rows):
        if copy_selection.first_64_rows_only and warpgroup:
            plgpu.barrier_arrive(full)
            continue
        # Copied by rows, not by swizzle atoms of eight rows: a group may start at any row.
        source, target = call.operands["lhs"].at[pl.ds(first, WGMMA_M), k_slice], slot * CONSUMER_WARPGROUPS + warpgroup
        plgpu.copy_gmem_to_smem(source, shared.a_rows_view.at[target], full, collective_axes=axes)


def _copy_matrix(call: Call, tile: OutputTile, copy_selection: TileCopySelection, k_slice: Any, slot: Any) -> None:
    """Copies a step of the matrix's columns."""
    spec, shared, size = call.spec, call.shared_memory, call.spec.tile.block_n
    begin, target = tile.first_column, shared.b.at[slot]
    if copy_selection.half_columns:
        size //= 2
        begin, target = begin + tile.column_half * size, shared.b_half_tiles.at[2 * slot]
    columns = pl.ds(begin, size)
    matrix_slices = (columns, k_slice) if spec.matrices_are_transposed else (k_slice, columns)
    source = call.operands["rhs"].at[tile.matrix_index, *matrix_slices]
    copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, shared.operands_full.at[slot])
    if spec.tile.cluster_m > 1:
        # Tiles of one group: each member copies half of the matrix for both. At the boundary of two groups each copies
        # its own.
        pl.when(tile.cluster_shares_matrix)(functools.partial(copy, collective_axes=clusters.CLUSTER_AXIS))
        pl.when(~tile.cluster_shares_matrix)(copy)
    else:
        copy()
