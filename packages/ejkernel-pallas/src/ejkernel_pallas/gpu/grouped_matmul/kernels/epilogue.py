"""Epilogue of the kernels of rows: from registers, through buffers in shared memory, to the output."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.hopper.row_ranges import store_rows
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M


def write_rows(call: Call, tiles: list[Any], row: Any, column: Any, end: Any) -> None:
    """Writes a warpgroup's rows before `end`; `tiles` are neighbouring columns."""
    tiles = [made.astype(call.spec.out) for made in tiles]
    whole = end - row >= WGMMA_M
    pl.when(whole)(lambda: copy_out(call, pieces_of(call, tiles, row, column)))

    @pl.when(~whole)
    def _store() -> None:
        # In a group of fewer than 64 rows a copy would overwrite rows of the next group.
        for number, made in enumerate(tiles):
            store_rows(call.output, made, row, column + number * made.shape[1], end - row)


def pieces_of(call: Call, tiles: list[Any], row: Any, column: Any) -> list[tuple[Any, Any, Any]]:
    """Returns the pieces of neighbouring tiles that are copied: first row, first column, and values, for one buffer
    each.
    """
    width = call.spec.part
    parts = [made[:, n : n + width].astype(call.spec.out) for made in tiles for n in range(0, made.shape[1], width)]
    return [(row, column + number * width, part) for number, part in enumerate(parts)]


def copy_out(call: Call, pieces: list[tuple[Any, Any, Any]]) -> None:
    """Writes pieces of 64 rows through shared memory, one after the other."""
    spec, shared, slots = call.spec, call.shared, call.spec.tile.slots
    first = lax.axis_index("warpgroup") * slots
    # All at once, if there are buffers for all: two barriers instead of two per piece.
    together = len(pieces) if len(pieces) <= slots else 1

    def group(begin: int) -> None:
        # Waits for the copies out of these buffers: those of the last tile, or all but the last few of this one.
        plgpu.wait_smem_to_gmem(min(begin, slots - together), wait_read_only=True)
        for number in range(begin, begin + together):
            shared.out[first + number % slots] = pieces[number][2]
        # Fence: makes the warpgroup's stores (generic proxy) visible to the copies (async proxy).
        plgpu.commit_smem()
        for number in range(begin, begin + together):
            row, column, _ = pieces[number]
            # Columns of the last tile that are past the output's end are not copied.
            whole = spec.even or together == 1
            copy = functools.partial(_copy_piece, call, first + number % slots, row, column)
            copy() if whole else pl.when(column < spec.columns)(copy)

    for begin in range(0, len(pieces), together):
        # A piece that is not copied must not use a buffer either, since waits count the copies.
        whole = spec.even or together > 1
        write = functools.partial(group, begin)
        write() if whole else pl.when(pieces[begin][1] < spec.columns)(write)


def _copy_piece(call: Call, slot: Any, row: Any, column: Any) -> None:
    """Starts to copy a buffer to the output."""
    target = call.output.at[pl.ds(row, WGMMA_M), pl.ds(column, call.spec.part)]
    plgpu.copy_smem_to_gmem(call.shared.out_lines.at[slot], target)
