"""Multiplies the rows of all devices with this device's matrix, while rows travel around a ring.

    distance           0              1              2          ...   P - 1
    products of        rows of i      rows of i + 1  rows of i + 2
    sends to i - 1     rows of i      rows of i + 1  ...              nothing

A tile of the first column sends the rows that it has in shared memory for its products: rows are read once for both. If
the gathered rows are a result, it copies the device's rows there, too. A counter per row of tiles tells the next device
that they have arrived; its blocks wait for the row that they need, which was sent about a device's products earlier.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ejkernel_pallas.gpu.collective_matmul.config import BLOCK_M
from ejkernel_pallas.gpu.collective_matmul.kernels import synchronisation
from ejkernel_pallas.gpu.collective_matmul.kernels.tiles import (
    Call,
    Tile,
    copy_operands,
    device_at,
    locate_tile,
    run_warpgroups,
    stage_rows,
    sum_products,
    warpgroup_first_row,
    write_sums,
)
from ejkernel_pallas.gpu.collective_matmul.spec import CONSUMER_WARPGROUPS, CONTRACTED_PER_STEP, OUTPUT_BUFFER_COLUMNS
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

THIS_DEVICE_FIRST = 0
"""The offset from a device to the one whose rows it multiplies first."""


def gather_matmul_kernel(call: Call, *, keeps_rows: bool) -> None:
    """Runs one thread block of the kernel, which also writes this device's rows next to those of others if
    `keeps_rows`.
    """

    def multiply_tile(number: Any, steps_done: Any) -> None:
        tile = locate_tile(call, number, THIS_DEVICE_FIRST)
        if call.spec.num_devices == 1:
            _write_tile(call, tile, sum_products(call, steps_done))
        else:
            _write_tile(call, tile, _multiply_and_send(call, tile, steps_done, keeps_rows=keeps_rows))

    run_warpgroups(
        call,
        multiply_tile,
        lambda number, steps_done: _copy_tile(call, locate_tile(call, number, THIS_DEVICE_FIRST), steps_done),
    )


def _copy_tile(call: Call, tile: Tile, steps_done: Any) -> None:
    """Copies a tile's operands, whose rows are this device's or have been sent to it."""
    spec, row = call.spec, tile.tile_row * BLOCK_M
    if spec.num_devices == 1:
        copy_operands(call, call.x, row, tile.first_column, steps_done)
        return
    # Two loops: the rows of a loop are those of one array.
    pl.when(tile.distance == 0)(lambda: copy_operands(call, call.x, row, tile.first_column, steps_done))

    @pl.when(tile.distance > 0)
    def _copy_rows_of_another_device() -> None:
        arrivals = call.arrivals.at[(tile.distance - 1) * spec.tile_rows + tile.tile_row]
        synchronisation.wait_for_copies(arrivals, CONSUMER_WARPGROUPS)
        first_row = tile.device * spec.rows_per_device + row
        copy_operands(call, call.exchange, first_row, tile.first_column, steps_done)


def _multiply_and_send(call: Call, tile: Tile, steps_done: Any, *, keeps_rows: bool) -> jax.Array:
    """Returns a warpgroup's sums of a tile, and sends its rows to the next device of the ring."""
    spec, first_row = call.spec, _first_row(call, tile)
    sends = (tile.first_column == 0) & (tile.distance < spec.num_devices - 1)
    # From this device's constants alone, since the host computes the address of the copies' target.
    target = synchronisation.remote_device(spec.axis_name, device_at(spec, spec.num_devices - 1))
    target_rows = plgpu.remote_ref(call.exchange, target)
    arrivals = call.arrivals.at[tile.distance * spec.tile_rows + tile.tile_row]

    def send_rows(k_step: Any, slot: Any) -> None:
        columns = pl.ds(k_step * CONTRACTED_PER_STEP, CONTRACTED_PER_STEP)
        part = pl.ds(first_row, WGMMA_M), columns
        if keeps_rows:
            # In one group with the copy that follows.
            @pl.when(tile.distance == 0)
            def _keep_rows() -> None:
                plgpu.copy_smem_to_gmem(stage_rows(call, slot), call.exchange.at[*part], commit_group=False)

        plgpu.copy_smem_to_gmem(stage_rows(call, slot), target_rows.at[*part])
        # The copies of the previous step have read its stage, which is freed next.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    return sum_products(
        call,
        steps_done,
        lambda k_step, slot: pl.when(sends)(lambda: send_rows(k_step, slot)),
        lambda: pl.when(sends)(lambda: synchronisation.announce_copies(arrivals, target)),
    )


def _write_tile(call: Call, tile: Tile, sums: jax.Array) -> None:
    """Writes a warpgroup's part of a tile."""
    width = OUTPUT_BUFFER_COLUMNS
    pieces = lambda piece: sums[:, piece * width : (piece + 1) * width]  # noqa: E731
    write_sums(call, _first_row(call, tile), tile.first_column, pieces)


def _first_row(call: Call, tile: Tile) -> Any:
    """Returns a warpgroup's first row of a tile, among the rows of all devices."""
    return tile.device * call.spec.rows_per_device + warpgroup_first_row(tile.tile_row)
