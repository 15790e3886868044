"""The loops that the kernels of rows share: a persistent block processes tiles one after another, and their steps.

    warpgroup 2, producer        A A B | A A B | A A B | ...      TMA, up to `stages` steps ahead, across tiles
                                  |       |       |               full barriers
    warpgroup 0, consumer         [64, 64] x [64, BN]  ...  acc   WGMMA; a step later, free barriers
    warpgroup 1, consumer         [64, 64] x [64, BN]  ...  acc
                                                             |
                     registers -> slots of shared memory -> TMA (module `epilogue`)

A block takes every `num_blocks`-th tile of the list, or the next one of a counter (module `work_queue`). Each warpgroup
has 64 rows with any first row, so the rows of A are copied separately for each. In a group's last tile the 64 rows end
with the group: rows that are in two tiles are stored twice, with the same values, so that bulk copies of 64 rows can be
used. Only groups of fewer than 64 rows are stored row by row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul.row_tiles import VALUES_PER_TILE
from ejkernel_pallas.gpu.grouped_matmul.kernels import producer, work_queue
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import (
    OutputTile,
    load_output_tile,
    num_cluster_tile_rows,
    num_split_tiles,
)
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS
from ejkernel_pallas.gpu.hopper import arrays, clusters
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M

MultiplyTile = Callable[[Call, OutputTile, Any], None]
"""Computes a warpgroup's part of a tile: (call, tile, number of steps of all earlier tiles) -> None."""
MultiplyAllTiles = Callable[[Call, Any, Any, Any], None]
"""A loop over all tiles: (call, tiles before those of groups, tiles of groups, loop) -> None."""


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Buffers in shared memory and their barriers.

    Attributes:
        a: Rows in the layout of products, [stages * warpgroups, 64, 64], or for 8 bits [..., 128].
        a_rows_view: The same memory in the layout of copies: row after row, so that they may start at any row.
        b: Tiles of matrices, [stages, 64, BN] or [stages, BN, 64], or of 8 bits [stages, BN, 128].
        b_half_tiles: The same memory as half tiles, [2 * stages, 64, BN / 2] or the like; None if tiles are not split.
        output_buffers: Output buffers in the layout of registers, [warpgroups * slots, 64, part].
        output_rows_view: The same memory in the layout of copies.
        operands_full: Mbarriers: the operands of a stage have arrived.
        operands_free: Mbarriers: the operands of a stage have been read.
        column_scales: Scales of a step's columns, float32 [stages + 1, BN]; None without scales.
        row_scales: Scales of each warpgroup's rows in some blocks, float32 [stages, warpgroups, 64, blocks]; None if
            they are not copied.
        next_tile_index: Indices of the block's next tiles, after even and after odd ones, int32 [2]; None without a
            counter.
        next_tile_full: Mbarriers: an index has been written.
        next_tile_free: Mbarriers: an index has been read.
    """

    a: Any
    a_rows_view: Any
    b: Any
    output_buffers: Any
    output_rows_view: Any
    operands_full: Any
    operands_free: Any
    b_half_tiles: Any = None
    column_scales: Any = None
    row_scales: Any = None
    next_tile_index: Any = None
    next_tile_full: Any = None
    next_tile_free: Any = None


def run_row_kernel(
    call: Call, multiply_tile: MultiplyTile, multiply_all_overlapped: MultiplyAllTiles | None = None
) -> None:
    """Runs one thread block of a kernel of rows: each warpgroup's loop over the block's tiles.

    Args:
        call: What the kernel is called with.
        multiply_tile: Computes a consumer's part of a tile, from its products to memory.
        multiply_all_overlapped: The consumers' loop over tiles that are stored during the next tile's products.
    """
    warpgroup, spec, table = lax.axis_index("warpgroup"), call.spec, call.operands["tiles"]
    # Numbers of tiles of unassigned rows, of groups, and of all; computed on the device, as group sizes may be traced.
    tiles_before, group_tiles, total_tiles = (table[spec.tile_list_length, n] for n in range(3))
    if "same" in call.operands:
        call = dataclasses.replace(call, columns_share_scales=call.operands["same"][0] != 0)
    first_tile = lax.axis_index("block")

    def for_each_tile(process_tile: Any, num_tile_rows: Any, *state: Any, includes_split_tiles: bool = False) -> Any:
        # A block's first tile has the block's index; `work_queue` has the index of the next.
        limit = num_cluster_tile_rows(spec, num_tile_rows) * spec.num_column_tiles
        if includes_split_tiles:
            limit = limit + num_split_tiles(call, num_tile_rows)
        return lax.while_loop(lambda carry: carry[0] < limit, process_tile, (first_tile, I32(0), *state))[1:]

    @pl.when(warpgroup < CONSUMER_WARPGROUPS)
    def _run_consumer() -> None:
        plgpu.set_max_registers(spec.registers_per_thread[0], action="increase")
        # Unassigned rows come first: these stores overlap with the producer's first copies.
        for_each_tile(
            functools.partial(_zero_unassigned_rows, call, tiles_before, group_tiles, total_tiles),
            total_tiles - group_tiles,
        )
        if spec.stores_during_next_tile and multiply_all_overlapped is not None:
            multiply_all_overlapped(call, tiles_before, group_tiles, for_each_tile)
        else:
            for_each_tile(
                functools.partial(_multiply_tile, call, multiply_tile, tiles_before, group_tiles),
                group_tiles,
                includes_split_tiles=True,
            )
        # The block must not end before the copies out of its shared memory have.
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMER_WARPGROUPS)
    def _run_producer() -> None:
        plgpu.set_max_registers(spec.registers_per_thread[1], action="decrease")
        (steps_done,) = for_each_tile(
            functools.partial(producer.copy_tile_steps, call, tiles_before, group_tiles),
            group_tiles,
            includes_split_tiles=True,
        )
        if spec.gathers_rows:
            pl.when(steps_done > 0)(lambda: producer.signal_gathered_rows(call, steps_done - 1, max_in_flight=0))

    if spec.blocks_per_cluster > 1:
        clusters.wait_for_cluster()  # copies and arrivals of the other member access this block's shared memory


def _multiply_tile(
    call: Call, multiply_tile: MultiplyTile, first_group_tile_row: Any, num_tile_rows: Any, carry: Any
) -> Any:
    """Computes a warpgroup's part of a tile; returns the index of the block's next tile."""
    number, steps_done = carry
    multiply_tile(call, load_output_tile(call, first_group_tile_row, num_tile_rows, number), steps_done)
    return work_queue.wait_for_next_tile(call, number, steps_done), steps_done + call.spec.steps_per_tile


def accumulate_products(call: Call, steps_done: Any, sub_tile: SubTile) -> jax.Array:
    """Returns the sum of a warpgroup's products over all steps, and frees the last stage."""
    spec, shared = call.spec, call.shared_memory
    acc = pl.run_scoped(
        functools.partial(_sum_products, call, steps_done, sub_tile),
        plgpu.WGMMAAccumulatorRef((WGMMA_M, sub_tile.num_columns), jnp.float32),
    )
    # Frees the stage of the last product, which no later step of this tile would free.
    plgpu.barrier_arrive(
        shared.operands_free.at[lax.rem(steps_done + (spec.steps_per_tile - 1), I32(spec.tile.stages))]
    )
    return acc


def _sum_products(call: Call, steps_done: Any, sub_tile: SubTile, acc: Any) -> Any:
    """Returns the products of a warpgroup's part of a tile."""
    lax.fori_loop(
        0,
        call.spec.steps_per_tile,
        functools.partial(issue_product_and_free_previous_stage, call, sub_tile, acc),
        steps_done,
    )
    return acc[...]


def issue_product_and_free_previous_stage(call: Call, sub_tile: SubTile, acc: Any, k_step: Any, steps_done: Any) -> Any:
    """Issues a product, and frees the stage of the previous one."""
    shared, stages = call.shared_memory, call.spec.tile.stages
    issue_product(call, steps_done, sub_tile, acc)
    # One product stays in flight, so that the tensor cores do not idle.
    plgpu.wgmma_wait(1)
    last_stage = lax.rem(steps_done + (stages - 1), I32(stages))
    # At index 0 the previous product was the last one of another tile, which has freed its stage.
    pl.when(k_step > 0)(lambda: plgpu.barrier_arrive(shared.operands_free.at[last_stage]))
    return steps_done + 1


def issue_product(call: Call, steps_done: Any, sub_tile: SubTile, acc: Any) -> None:
    """Issues the product of a step."""
    spec, shared = call.spec, call.shared_memory
    columns = () if sub_tile.num_columns == spec.tile.block_n else (pl.ds(sub_tile.first_column, sub_tile.num_columns),)
    slot = lax.rem(steps_done, I32(spec.tile.stages))
    plgpu.barrier_wait(shared.operands_full.at[slot])
    column_slices = columns if spec.matrices_are_transposed or not columns else (slice(None), *columns)
    matrix = shared.b_half_tiles.at[2 * slot] if sub_tile.is_half_tile else shared.b.at[slot, *column_slices]
    # A transposed view: descriptors of 16-bit operands say which axis is contiguous, so no data moves.
    matrix = matrix.transpose((1, 0)) if spec.matrices_are_transposed else matrix
    plgpu.wgmma(acc, shared.a.at[slot * CONSUMER_WARPGROUPS + sub_tile.row_block_index], matrix)


def _zero_unassigned_rows(
    call: Call, first_group_tile_row: Any, num_group_tile_rows: Any, num_tile_rows: Any, carry: Any
) -> Any:
    """Writes zeros to a warpgroup's part of a tile of unassigned rows. Such tiles are the first and the last entries of
    the tile list.
    """
    number, steps_done = carry
    spec, table = call.spec, call.operands["tiles"]
    tile_row = lax.div(number, I32(spec.num_column_tiles)) * spec.tile.cluster_m + call.cluster_row
    entry = jnp.minimum(tile_row, num_tile_rows - num_group_tile_rows - 1)
    # The entries of groups are between those of unassigned rows.
    entry = jnp.where(entry < first_group_tile_row, entry, entry + num_group_tile_rows)
    _, row, end, begin = (table[entry, n] for n in range(VALUES_PER_TILE))
    column = (
        lax.rem(number, I32(spec.num_column_tiles)) * spec.tile.cluster_n + call.cluster_column
    ) * spec.tile.block_n
    tile = OutputTile(I32(0), jnp.bool_(False), row, begin, end, column)
    zeros = arrays.zero_tile((WGMMA_M, spec.tile.block_n))
    write_rows(call, [zeros], tile.first_row_of_warpgroup(lax.axis_index("warpgroup")), tile.first_column, end)
    return number + call.num_blocks, steps_done
