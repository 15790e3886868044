"""Multiplies this device's contracted elements for the rows of all devices, and sends each its part of the sum.

    distance           0                  1            ...   P - 1
    products of        rows of i + 1      rows of i + 2      rows of i
    results go         to i + 1           to i + 2           to the output, with what has arrived

A warpgroup stores float32 sums from its registers to the other device's memory, which has a slot per sender. The rows
of this device come last: the sums that others have sent arrived about one device's products earlier. They are added in
the order of slots, so results are reproducible bit for bit.
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
    locate_tile,
    run_warpgroups,
    sum_products,
    warpgroup_first_row,
    write_sums,
)
from ejkernel_pallas.gpu.collective_matmul.spec import CONSUMER_WARPGROUPS, OUTPUT_BUFFER_COLUMNS
from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

THIS_DEVICE_LAST = 1
"""The offset from a device to the one whose rows it multiplies first."""


def matmul_scatter_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    run_warpgroups(
        call,
        lambda number, steps_done: _multiply_tile(call, locate_tile(call, number, THIS_DEVICE_LAST), steps_done),
        lambda number, steps_done: _copy_tile(call, locate_tile(call, number, THIS_DEVICE_LAST), steps_done),
    )


def _copy_tile(call: Call, tile: Tile, steps_done: Any) -> None:
    """Copies a tile's operands."""
    first_row = tile.device * call.spec.rows_per_device + tile.tile_row * BLOCK_M
    copy_operands(call, call.x, first_row, tile.first_column, steps_done)


def _multiply_tile(call: Call, tile: Tile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, and sends it or adds what others have sent."""
    sums, last = sum_products(call, steps_done), call.spec.num_devices - 1
    if last == 0:
        _add_and_write(call, tile, sums)
        return
    pl.when(tile.distance < last)(lambda: _send_sums(call, tile, sums))
    pl.when(tile.distance == last)(lambda: _add_and_write(call, tile, sums))


def _send_sums(call: Call, tile: Tile, sums: jax.Array) -> None:
    """Stores sums of another device's rows in its memory."""
    spec, device = call.spec, synchronisation.remote_device(call.spec.axis_name, tile.device)
    rows, columns = pl.ds(warpgroup_first_row(tile.tile_row), WGMMA_M), pl.ds(tile.first_column, spec.block_n)
    plgpu.remote_ref(call.exchange, device).at[tile.distance, rows, columns][...] = sums
    synchronisation.announce_stores(call.arrivals.at[tile.distance * spec.tile_rows + tile.tile_row], device)


def _add_and_write(call: Call, tile: Tile, sums: jax.Array) -> None:
    """Adds what other devices have sent, and writes the output."""
    spec, first_row = call.spec, warpgroup_first_row(tile.tile_row)
    for place in range(spec.num_devices - 1):
        arrivals = call.arrivals.at[place * spec.tile_rows + tile.tile_row]
        synchronisation.wait_for_stores(arrivals, CONSUMER_WARPGROUPS * spec.tile_columns)

    def add_piece(piece: int) -> jax.Array:
        start = piece * OUTPUT_BUFFER_COLUMNS
        total = sums[:, start : start + OUTPUT_BUFFER_COLUMNS]
        rows = pl.ds(first_row, WGMMA_M)
        columns = pl.ds(tile.first_column + start, OUTPUT_BUFFER_COLUMNS)
        for place in range(spec.num_devices - 1):
            total = total + arrays.load_score_tile(call.exchange.at[place, rows, columns])
        return total

    write_sums(call, first_row, tile.first_column, add_piece)
