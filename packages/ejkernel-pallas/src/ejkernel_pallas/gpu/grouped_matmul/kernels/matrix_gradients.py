"""Computes sums over the rows of each group on Hopper: the gradient of the matrices.

    warpgroup 2, producer     [64 rows, 128] [64 rows, BN] | ...        TMA, up to `stages` steps ahead, across tiles
    warpgroup 0, consumer     columns 0..63 of the first, transposed, times the second: acc [64, BN]
    warpgroup 1, consumer     columns 64..127

A tile belongs to one matrix; its steps are 64 rows of the matrix's group each, starting at the last multiple of 8 that
is not after the group's first row, where copies can start. The first and the last step may include rows of other
groups: the producer waits for those copies and overwrites them with zeros, in both operands, as zero times NaN is NaN.
Sums are in the order of rows, so that results are reproducible bit for bit.
"""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    CONSUMER_REGISTERS_PER_THREAD,
    CONSUMER_WARPGROUPS,
    CONTRACTED_PER_STEP_16_BIT,
    PRODUCER_REGISTERS_PER_THREAD,
)
from ejkernel_pallas.gpu.hopper import clusters
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows_outside
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M

ROW_ALIGNMENT = 8
"""Copies in the layout of products start at rows that are multiples of this."""


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Buffers in shared memory and their barriers.

    Attributes:
        left_tiles: [stages, 64, 128].
        right_tiles: [stages, 64, BN].
        output_buffers: Output buffers, [warpgroups * slots, 64, part].
        operands_full: Mbarriers: the operands of a stage have arrived.
        operands_free: Mbarriers: the operands of a stage have been read.
        copies_done: Mbarriers: operands with rows of other groups have arrived, before these are zeroed. One per stage,
            as the other member of a cluster, which may be a step ahead, copies half of them.
    """

    left_tiles: Any
    right_tiles: Any
    output_buffers: Any
    operands_full: Any
    operands_free: Any
    copies_done: Any


@dataclasses.dataclass(frozen=True)
class GradientTile:
    """One tile of one matrix.

    Attributes:
        matrix: Index of the matrix.
        row: First row of the tile.
        column: First column.
        group_start: First row of the group.
        group_end: The row after the group's last.
        first_copied_row: First row of the first step.
        num_steps: Number of steps.
    """

    matrix: Any
    row: Any
    column: Any
    group_start: Any
    group_end: Any
    first_copied_row: Any
    num_steps: Any


def matrix_gradients_kernel(call: Call) -> None:
    """Runs one thread block of the kernel: each warpgroup's loop over the block's tiles."""
    warpgroup, spec = lax.axis_index("warpgroup"), call.spec
    count = spec.num_matrices * spec.tile_rows_per_matrix * spec.num_column_tiles

    def for_each_tile(process_tile: Any) -> None:
        lax.while_loop(
            lambda carry: carry[0] < count, functools.partial(process_tile, call), (lax.axis_index("block"), I32(0))
        )

    @pl.when(warpgroup < CONSUMER_WARPGROUPS)
    def _run_consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS_PER_THREAD, action="increase")
        for_each_tile(_multiply_tile)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMER_WARPGROUPS)
    def _run_producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS_PER_THREAD, action="decrease")
        for_each_tile(_copy_tile_steps)

    if spec.blocks_per_cluster > 1:
        clusters.wait_for_cluster()  # copies and arrivals of the other member access this block's shared memory


def _locate_tile(call: Call, tile_index: Any) -> GradientTile:
    """Returns the tile with an index: matrix by matrix, each in bands of tile rows, in a band column by column.

    Matrices are ordered by their groups' rows, the largest first. Each block has one tile per `num_blocks` tiles,
    alternately from either end, so that two consecutive tiles take about as long for all blocks, for any group sizes.
    """
    spec = call.spec
    tile_index = _reverse_every_second_round(call, tile_index)
    per_matrix, tiles_per_group = (
        spec.tile_rows_per_matrix * spec.num_column_tiles,
        spec.tile.group_m * spec.num_column_tiles,
    )
    matrix, remainder = lax.div(tile_index, I32(per_matrix)), lax.rem(tile_index, I32(per_matrix))
    group_m, remainder = lax.div(remainder, I32(tiles_per_group)), lax.rem(remainder, I32(tiles_per_group))
    height = jnp.minimum(spec.tile_rows_per_matrix - group_m * spec.tile.group_m, spec.tile.group_m)
    row = (
        (group_m * spec.tile.group_m + lax.rem(remainder, height)) * spec.tile.cluster_m + call.cluster_row
    ) * BLOCK_M
    column = (lax.div(remainder, height) * spec.tile.cluster_n + call.cluster_column) * spec.tile.block_n
    first, end, matrix = (call.operands["bounds"][matrix, n] for n in range(3))
    # Copies use a view of the array in tiles of eight rows, and start at one of them.
    start = lax.div(first, I32(ROW_ALIGNMENT)) * ROW_ALIGNMENT
    steps = jnp.where(
        end > first, lax.div(end - start + (CONTRACTED_PER_STEP_16_BIT - 1), I32(CONTRACTED_PER_STEP_16_BIT)), 0
    )
    return GradientTile(matrix, row, column, first, end, start, steps)


def _reverse_every_second_round(call: Call, tile_index: Any) -> Any:
    """Returns the index of a block's tile in a round: every second round is in reverse order."""
    round_index, block = lax.div(tile_index, I32(call.num_blocks)), lax.rem(tile_index, I32(call.num_blocks))
    # A last round with fewer tiles than blocks is not reversed.
    whole = (
        round_index + 1
    ) * call.num_blocks <= call.spec.num_matrices * call.spec.tile_rows_per_matrix * call.spec.num_column_tiles
    return jnp.where(
        whole & (lax.rem(round_index, I32(2)) == 1), tile_index - block + (call.num_blocks - 1 - block), tile_index
    )


def _copy_tile_steps(call: Call, carry: Any) -> Any:
    """Copies all steps of a tile."""
    number, steps_done = carry
    tile, spec, shared = _locate_tile(call, number), call.spec, call.shared_memory
    left, right = call.operands["left"], call.operands["right"]

    def step(index: Any, steps_done: Any) -> Any:
        slot = lax.rem(steps_done, I32(spec.tile.stages))
        # Steps are counted over all tiles: the ring of stages continues from tile to tile, and its first round finds
        # all stages free.
        pl.when(steps_done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.operands_free.at[slot]))
        start = tile.first_copied_row + index * CONTRACTED_PER_STEP_16_BIT
        rows, full = pl.ds(start, CONTRACTED_PER_STEP_16_BIT), shared.operands_full.at[slot]

        def copy_operands(barrier: Any) -> None:
            row_slice, column_slice = pl.ds(tile.row, BLOCK_M), pl.ds(tile.column, spec.tile.block_n)
            # Multicast: each member of a cluster copies one half of what both of them read.
            left_axes = clusters.CLUSTER_AXIS if spec.tile.cluster_n > 1 else None
            right_axes = clusters.CLUSTER_AXIS if spec.tile.cluster_m > 1 else None
            copy = plgpu.copy_gmem_to_smem
            copy(left.at[rows, row_slice], shared.left_tiles.at[slot], barrier, collective_axes=left_axes)
            copy(right.at[rows, column_slice], shared.right_tiles.at[slot], barrier, collective_axes=right_axes)

        # This is the same in both members of a cluster, which have tiles of one matrix: multicast copies arrive at the
        # same mbarrier in both.
        is_one_group = (start >= tile.group_start) & (start + CONTRACTED_PER_STEP_16_BIT <= tile.group_end)
        # All rows belong to the group.
        pl.when(is_one_group)(lambda: copy_operands(full))

        @pl.when(~is_one_group)
        def _zero_rows_of_other_groups() -> None:
            # Uses another mbarrier, so that consumers do not see the rows of other groups.
            raw = shared.copies_done.at[slot]
            copy_operands(raw)
            # The next copies wait, too. Issuing them first was not faster: 0.91 instead of 0.93 of PyTorch's rate
            # (docs/lab/grouped_matmul_gpu.md).
            plgpu.barrier_wait(raw)
            for operand_smem in (shared.left_tiles, shared.right_tiles):
                zero_rows_outside(operand_smem.at[slot], tile.group_start - start, tile.group_end - start)
            # Fence: makes the stores of zeros (generic proxy) visible to the products (async proxy).
            plgpu.commit_smem()
            # Arrives twice, since `full` counts the copies of two operands.
            plgpu.barrier_arrive(full)
            plgpu.barrier_arrive(full)

        return steps_done + 1

    return number + call.num_blocks, lax.fori_loop(0, tile.num_steps, step, steps_done)


def _multiply_tile(call: Call, carry: Any) -> Any:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    number, steps_done = carry
    tile, spec, shared = _locate_tile(call, number), call.spec, call.shared_memory
    warpgroup, stages = lax.axis_index("warpgroup"), spec.tile.stages

    def multiply_all_steps(acc: Any) -> Any:
        def step(index: Any, steps_done: Any) -> Any:
            slot = lax.rem(steps_done, I32(stages))
            plgpu.barrier_wait(shared.operands_full.at[slot])
            left_columns = shared.left_tiles.at[slot, :, pl.ds(warpgroup * WGMMA_M, WGMMA_M)]
            # The descriptor transposes: WGMMA reads 16-bit operands in either order from shared memory.
            plgpu.wgmma(acc, left_columns.transpose((1, 0)), shared.right_tiles.at[slot])
            plgpu.wgmma_wait(1)  # the previous product has read its operands
            last = lax.rem(steps_done + (stages - 1), I32(stages))
            # At index 0 the previous product was another tile's, which has freed its stage.
            pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.operands_free.at[last]))
            return steps_done + 1

        # An empty group has no steps: its gradient is the accumulator's zeros.
        lax.fori_loop(0, tile.num_steps, step, steps_done)
        return acc[...]

    gradient = pl.run_scoped(multiply_all_steps, plgpu.WGMMAAccumulatorRef((WGMMA_M, spec.tile.block_n), jnp.float32))
    steps_done = steps_done + tile.num_steps
    # `acc[...]` has waited for all products. A tile without steps has used no stage.
    last = lax.rem(steps_done + (stages - 1), I32(stages))
    pl.when(tile.num_steps > 0)(lambda: plgpu.barrier_arrive(shared.operands_free.at[last]))
    _write_tile(call, tile, gradient.astype(spec.out_dtype))
    return number + call.num_blocks, steps_done


def _write_tile(call: Call, tile: GradientTile, tile_gradient: Any) -> None:
    """Writes a warpgroup's rows through shared memory, some columns at a time."""
    spec, shared, warpgroup = call.spec, call.shared_memory, lax.axis_index("warpgroup")
    row = tile.row + warpgroup * WGMMA_M
    for piece_index in range(spec.tile.block_n // spec.output_buffer_columns):
        start_column = piece_index * spec.output_buffer_columns

        def copy_columns(piece_index: int = piece_index, start_column: int = start_column) -> None:
            slot = warpgroup * spec.tile.output_buffers + piece_index % spec.tile.output_buffers
            # the previous copy out of this buffer has read it
            plgpu.wait_smem_to_gmem(spec.tile.output_buffers - 1, wait_read_only=True)
            shared.output_buffers[slot] = tile_gradient[:, start_column : start_column + spec.output_buffer_columns]
            plgpu.commit_smem()
            target = call.output.at[
                tile.matrix, pl.ds(row, WGMMA_M), pl.ds(tile.column + start_column, spec.output_buffer_columns)
            ]
            plgpu.copy_smem_to_gmem(shared.output_buffers.at[slot], target)

        # Rows and columns of the last tiles that are past the matrix's ends are not copied.
        pl.when((row < spec.contracted_size) & (tile.column + start_column < spec.num_columns))(copy_columns)
