"""What the kernels of products share: a persistent block's loop over tiles, copies of operands, and the epilogue.

    warpgroup 2, producer     A A B | A A B | ...              TMA, up to `stages` steps ahead, across tiles
                                 |       |                     full barriers
    warpgroup 0, consumer        [64, 64] x [64, BN] ... acc   WGMMA; a step later, free barriers
    warpgroup 1, consumer        [64, 64] x [64, BN] ... acc
                                                          |
                      registers -> slots of shared memory -> TMA

A block takes every `num_blocks`-th tile of a list that has the tiles of one device's rows after those of another's: the
block goes on to rows that another device has sent without waiting for the others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.collective_matmul.config import BLOCK_M
from ejkernel_pallas.gpu.collective_matmul.spec import (
    CONSUMER_REGISTERS_PER_THREAD,
    CONSUMER_WARPGROUPS,
    CONTRACTED_PER_STEP,
    OUTPUT_BUFFER_COLUMNS,
    PRODUCER_REGISTERS_PER_THREAD,
    CollectiveSpec,
)
from ejkernel_pallas.gpu.hopper.launch import wgmma_operand_smem
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Buffers in shared memory and their barriers.

    Attributes:
        rows: Rows of each warpgroup, [stages * warpgroups, 64, 64].
        columns: Tiles of y, [stages, 64, BN] or [stages, BN, 64].
        output_buffers: Output buffers, [warpgroups * slots, 64, 64].
        operands_full: Mbarriers: the operands of a stage have arrived.
        operands_free: Mbarriers: the operands of a stage have been read.
    """

    rows: Any
    columns: Any
    output_buffers: Any
    operands_full: Any
    operands_free: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a kernel.

    Attributes:
        spec: Constants.
        num_blocks: Number of thread blocks.
        x: Rows in device memory.
        y: The matrix in device memory.
        output: The array in device memory that the kernel writes.
        exchange: The array in device memory that other devices write; None on one device.
        arrivals: Counters of what has arrived there, one per row of tiles and device; None on one device.
        shared_memory: Shared memory and barriers.
    """

    spec: CollectiveSpec
    num_blocks: int
    x: Any
    y: Any
    output: Any
    exchange: Any
    arrivals: Any
    shared_memory: SharedMemory


class Tile(NamedTuple):
    """A tile of the product.

    Attributes:
        distance: How many devices before the last of its list the tile's device is; the list has the tiles of the
            device at distance 0 first.
        device: The device that the rows belong to.
        tile_row: Index of the row of tiles among those of the device.
        first_column: First column.
    """

    distance: Any
    device: Any
    tile_row: Any
    first_column: Any


def device_at(spec: CollectiveSpec, offset: Any) -> Any:
    """Returns the index of the device `offset` after this one on the axis."""
    if spec.axis_name is None:
        return I32(0)
    return lax.rem(lax.axis_index(spec.axis_name) + offset, I32(spec.num_devices))


def locate_tile(call: Call, number: Any, first_offset: int) -> Tile:
    """Returns the tile with an index: device by device, each in bands of tile rows, in a band column by column.

    Args:
        call: The kernel's arguments.
        number: Index in the list.
        first_offset: The offset from this device to the first of the list.
    """
    spec = call.spec
    distance, number = _divide(number, spec.tiles_per_device)
    band, number = _divide(number, spec.tile.group_m * spec.tile_columns)
    first_row = band * spec.tile.group_m
    height = jnp.minimum(spec.tile_rows - first_row, spec.tile.group_m)
    column, row = lax.div(number, height), lax.rem(number, height)
    return Tile(distance, device_at(spec, distance + first_offset), first_row + row, column * spec.block_n)


def _divide(dividend: Any, divisor: int) -> tuple[Any, Any]:
    return lax.div(dividend, I32(divisor)), lax.rem(dividend, I32(divisor))


def run_warpgroups(
    call: Call, multiply_tile: Callable[[Any, Any], None], copy_tile: Callable[[Any, Any], None]
) -> None:
    """Runs one thread block: each warpgroup's loop over the block's tiles.

    Args:
        call: The kernel's arguments.
        multiply_tile: Computes a consumer's part of a tile: (index of the tile, steps of all earlier tiles) -> None.
        copy_tile: Copies a tile's operands, as the producer.
    """
    warpgroup, spec = lax.axis_index("warpgroup"), call.spec

    def for_each_tile(process: Callable[[Any, Any], None]) -> None:
        def process_and_advance(carry: Any) -> Any:
            number, steps_done = carry
            process(number, steps_done)
            return number + call.num_blocks, steps_done + spec.steps_per_tile

        total = spec.num_devices * spec.tiles_per_device
        lax.while_loop(lambda carry: carry[0] < total, process_and_advance, (lax.axis_index("block"), I32(0)))

    @pl.when(warpgroup < CONSUMER_WARPGROUPS)
    def _run_consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS_PER_THREAD, action="increase")
        for_each_tile(multiply_tile)
        # The block must not end before the copies out of its shared memory have.
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMER_WARPGROUPS)
    def _run_producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS_PER_THREAD, action="decrease")
        for_each_tile(copy_tile)


def copy_operands(call: Call, rows: Any, first_row: Any, first_column: Any, steps_done: Any) -> None:
    """Copies all steps of a tile, each once its stage is free.

    Args:
        call: The kernel's arguments.
        rows: The array in device memory that has the tile's rows.
        first_row: The first of them.
        first_column: First column of the tile.
        steps_done: Steps of all earlier tiles: the ring of stages continues from tile to tile.
    """
    spec, shared = call.spec, call.shared_memory

    def copy_step(k_step: Any, steps_done: Any) -> Any:
        slot = lax.rem(steps_done, I32(spec.tile.stages))
        full = shared.operands_full.at[slot]
        # The first round finds the stages free.
        pl.when(steps_done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.operands_free.at[slot]))
        k_slice = pl.ds(k_step * CONTRACTED_PER_STEP, CONTRACTED_PER_STEP)
        for warpgroup in range(CONSUMER_WARPGROUPS):
            source = rows.at[pl.ds(first_row + warpgroup * WGMMA_M, WGMMA_M), k_slice]
            plgpu.copy_gmem_to_smem(source, shared.rows.at[slot * CONSUMER_WARPGROUPS + warpgroup], full)
        columns = pl.ds(first_column, spec.block_n)
        y_slices = (columns, k_slice) if spec.y_is_transposed else (k_slice, columns)
        plgpu.copy_gmem_to_smem(call.y.at[*y_slices], shared.columns.at[slot], full)
        return steps_done + 1

    lax.fori_loop(0, spec.steps_per_tile, copy_step, steps_done)


def sum_products(
    call: Call,
    steps_done: Any,
    during_product: Callable[[Any, Any], None] = lambda k_step, slot: None,
    after_products: Callable[[], None] = lambda: None,
) -> jax.Array:
    """Returns a warpgroup's rows of a tile, float32 [64, BN].

    Args:
        call: The kernel's arguments.
        steps_done: Steps of all earlier tiles.
        during_product: Called when the product of a step has been issued, with the step and its stage; on return, the
            previous stage is no longer read by what earlier calls have started.
        after_products: Called after the last product; on return, the last stage is no longer read either.
    """
    spec, shared = call.spec, call.shared_memory

    def multiply_steps(acc: Any) -> Any:
        lax.fori_loop(0, spec.steps_per_tile, functools.partial(multiply_step, acc), steps_done)
        return acc[...]

    def multiply_step(acc: Any, k_step: Any, steps_done: Any) -> Any:
        slot = lax.rem(steps_done, I32(spec.tile.stages))
        plgpu.barrier_wait(shared.operands_full.at[slot])
        matrix = shared.columns.at[slot]
        # A transposed view: descriptors of 16-bit operands say which axis is contiguous, so no data moves.
        matrix = matrix.transpose((1, 0)) if spec.y_is_transposed else matrix
        plgpu.wgmma(acc, shared.rows.at[_rows_index(slot)], matrix)
        during_product(k_step, slot)
        # One product stays in flight, so that the tensor cores do not idle.
        plgpu.wgmma_wait(1)
        last_slot = lax.rem(steps_done + (spec.tile.stages - 1), I32(spec.tile.stages))
        # At index 0 the previous product was another tile's, which has freed its stage.
        pl.when(k_step > 0)(lambda: plgpu.barrier_arrive(shared.operands_free.at[last_slot]))
        return steps_done + 1

    accumulator = plgpu.WGMMAAccumulatorRef((WGMMA_M, spec.block_n), jnp.float32)
    sums = pl.run_scoped(multiply_steps, accumulator)
    after_products()
    last_slot = lax.rem(steps_done + (spec.steps_per_tile - 1), I32(spec.tile.stages))
    plgpu.barrier_arrive(shared.operands_free.at[last_slot])
    return sums


def stage_rows(call: Call, slot: Any) -> Any:
    """Returns a warpgroup's rows in a stage, [64, 64]."""
    return call.shared_memory.rows.at[_rows_index(slot)]


def _rows_index(slot: Any) -> Any:
    return slot * CONSUMER_WARPGROUPS + lax.axis_index("warpgroup")


def write_sums(call: Call, first_row: Any, first_column: Any, sums: Callable[[int], jax.Array]) -> None:
    """Writes a warpgroup's rows of a tile through shared memory, 64 columns at a time.

    Args:
        call: The kernel's arguments.
        first_row: First row of the output.
        first_column: First column.
        sums: Index of 64 columns -> their sums, [64, 64].
    """
    spec, buffers = call.spec, call.shared_memory.output_buffers
    slots = spec.tile.output_buffers
    for piece in range(spec.block_n // OUTPUT_BUFFER_COLUMNS):
        values = sums(piece).astype(spec.dtype)
        buffer = buffers.at[lax.axis_index("warpgroup") * slots + piece % slots]
        # The previous copy out of this buffer has read it.
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        buffer[...] = values
        # Fence: makes the warpgroup's stores (generic proxy) visible to the copies (async proxy).
        plgpu.commit_smem()
        columns = pl.ds(first_column + piece * OUTPUT_BUFFER_COLUMNS, OUTPUT_BUFFER_COLUMNS)
        plgpu.copy_smem_to_gmem(buffer, call.output.at[pl.ds(first_row, WGMMA_M), columns])


def warpgroup_first_row(tile_row: Any) -> Any:
    """Returns the first row of a warpgroup in a row of tiles."""
    return tile_row * BLOCK_M + lax.axis_index("warpgroup") * WGMMA_M


def product_scratch(spec: CollectiveSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `SharedMemory`."""
    tile, depth = spec.tile, CONTRACTED_PER_STEP
    part = (spec.block_n, depth) if spec.y_is_transposed else (depth, spec.block_n)
    buffers = CONSUMER_WARPGROUPS * tile.output_buffers
    return {
        "rows": wgmma_operand_smem((tile.stages * CONSUMER_WARPGROUPS, WGMMA_M, depth), spec.dtype),
        "columns": wgmma_operand_smem((tile.stages, *part), spec.dtype),
        "output_buffers": wgmma_operand_smem((buffers, WGMMA_M, OUTPUT_BUFFER_COLUMNS), spec.dtype),
        # The rows of each warpgroup, and the columns.
        "operands_full": plgpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS + 1, num_barriers=tile.stages),
        "operands_free": plgpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS, num_barriers=tile.stages),
    }
