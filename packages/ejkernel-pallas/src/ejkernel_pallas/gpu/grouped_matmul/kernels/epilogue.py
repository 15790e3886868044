"""Epilogue of the kernels of rows: from registers, through buffers in shared memory, to the output."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.hopper.row_ranges import store_rows
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M


def write_rows(call: Call, column_tiles: list[Any], first_row: Any, first_column: Any, end_row: Any) -> None:
    """Writes a warpgroup's rows before `end_row`; `column_tiles` are neighbouring columns."""
    column_tiles = [tile.astype(call.spec.out_dtype) for tile in column_tiles]
    whole = end_row - first_row >= WGMMA_M
    pl.when(whole)(lambda: copy_pieces_out(call, split_into_pieces(call, column_tiles, first_row, first_column)))

    @pl.when(~whole)
    def _store_rows_of_small_group() -> None:
        # In a group of fewer than 64 rows a copy would overwrite rows of the next group.
        for number, tile in enumerate(column_tiles):
            store_rows(call.output, tile, first_row, first_column + number * tile.shape[1], end_row - first_row)


def split_into_pieces(
    call: Call, column_tiles: list[Any], first_row: Any, first_column: Any
) -> list[tuple[Any, Any, Any]]:
    """Returns the pieces of neighbouring tiles that are copied: first row, first column, and values, for one buffer
    each.
    """
    width = call.spec.output_buffer_columns
    parts = [
        tile[:, n : n + width].astype(call.spec.out_dtype)
        for tile in column_tiles
        for n in range(0, tile.shape[1], width)
    ]
    return [(first_row, first_column + number * width, part) for number, part in enumerate(parts)]


def copy_pieces_out(call: Call, pieces: list[tuple[Any, Any, Any]]) -> None:
    """Writes pieces of 64 rows through shared memory, one after the other."""
    spec, shared, output_buffers = call.spec, call.shared_memory, call.spec.tile.output_buffers
    first = lax.axis_index("warpgroup") * output_buffers
    # All at once, if there are buffers for all: two barriers instead of two per piece.
    pieces_per_batch = len(pieces) if len(pieces) <= output_buffers else 1

    def copy_piece_batch(first_piece: int) -> None:
        # Waits for the copies out of these buffers: those of the last tile, or all but the last few of this one.
        plgpu.wait_smem_to_gmem(min(first_piece, output_buffers - pieces_per_batch), wait_read_only=True)
        for number in range(first_piece, first_piece + pieces_per_batch):
            shared.output_buffers[first + number % output_buffers] = pieces[number][2]
        # Fence: makes the warpgroup's stores (generic proxy) visible to the copies (async proxy).
        plgpu.commit_smem()
        for number in range(first_piece, first_piece + pieces_per_batch):
            row, column, _ = pieces[number]
            # Columns of the last tile that are past the output's end are not copied.
            whole = spec.tiles_divide_columns or pieces_per_batch == 1
            copy = functools.partial(_copy_buffer_to_output, call, first + number % output_buffers, row, column)
            copy() if whole else pl.when(column < spec.num_columns)(copy)

    for begin in range(0, len(pieces), pieces_per_batch):
        # A piece that is not copied must not use a buffer either, since waits count the copies.
        whole = spec.tiles_divide_columns or pieces_per_batch > 1
        write = functools.partial(copy_piece_batch, begin)
        write() if whole else pl.when(pieces[begin][1] < spec.num_columns)(write)


def _copy_buffer_to_output(call: Call, buffer_index: Any, row: Any, column: Any) -> None:
    """Starts to copy a buffer to the output."""
    target = call.output.at[pl.ds(row, WGMMA_M), pl.ds(column, call.spec.output_buffer_columns)]
    plgpu.copy_smem_to_gmem(call.shared_memory.output_rows_view.at[buffer_index], target)
