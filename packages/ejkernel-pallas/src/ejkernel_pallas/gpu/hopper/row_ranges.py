"""Handles rows of a tile that belong to another tile: zeroes them in shared memory, and skips them in stores."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel_pallas.gpu.hopper.launch import transforms
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import i32, int32_constant
from ejkernel_pallas.gpu.hopper.sizes import THREADS

LINE = 128
"""Bytes of a row that are written at once. The swizzle permutes the pieces of a line by row, which does not matter for
zeros.
"""
STORE_BYTES = 16
"""Bytes that a thread writes at a time."""
THREADS_PER_LINE = LINE // STORE_BYTES
"""Threads that write a line together."""
ROWS_PER_PASS = THREADS // THREADS_PER_LINE
"""Rows of which a warpgroup writes one line at once."""
STORE_PTX = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"


def write_zeros(base: Any, row: Any, size: int, line: int = LINE) -> None:
    """Writes zeros to a row of `size` bytes of a tile at an address: its lines are eight rows apart."""
    # Eight rows of a tile are `size / line` swizzle atoms of 8 x `line` bytes, one after the other.
    atom, row_in_atom = arith.divui(row, int32_constant(8)), arith.remui(row, int32_constant(8))
    address = arith.addi(base, arith.muli(atom, int32_constant(8 * size)))
    address = arith.addi(address, arith.muli(row_in_atom, int32_constant(line)))
    for first in range(0, size, line):
        for part in range(0, line, STORE_BYTES):
            offset = arith.addi(address, int32_constant(8 * first + part))
            llvm.inline_asm(None, [offset, int32_constant(0)], STORE_PTX, "r,r", has_side_effects=True)


def zero_rows(tile: Any, first: Any, end: Any) -> None:
    """Writes zeros to the rows of a tile before `first` and from `end` on.

    Args:
        tile: Reference to 16-bit elements [rows, size] in shared memory, in the layout of products.
        first: int32.
        end: int32.
    """
    rows, size = tile.shape
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms()), number, number))
    def zero_outside_range(_: Any, tile: Any, first: Any, end: Any) -> None:
        base = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile))
        # Writes use the generic proxy: callers commit before a product reads them.
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS))
        # Eight threads write a line, and a warp four neighbouring lines: 512 bytes without bank conflicts. With a
        # thread per row there would be eight-way conflicts, which would keep the tensor cores from shared memory
        # meanwhile.
        row, line_part = (
            arith.divui(thread, int32_constant(THREADS_PER_LINE)),
            arith.remui(thread, int32_constant(THREADS_PER_LINE)),
        )
        base = arith.addi(base, arith.muli(line_part, int32_constant(STORE_BYTES)))
        for pass_start in range(0, rows, ROWS_PER_PASS):
            tile_row = arith.addi(row, int32_constant(pass_start))
            is_before_first = arith.cmpi(arith.CmpIPredicate.slt, tile_row, first.registers.item())
            is_past_end = arith.cmpi(arith.CmpIPredicate.sge, tile_row, end.registers.item())
            in_tile = arith.cmpi(arith.CmpIPredicate.ult, tile_row, int32_constant(rows))
            with mgpu.utils.when(arith.andi(in_tile, arith.ori(is_before_first, is_past_end))):
                _zero_lines(base, tile_row, size * 2)

    zero_outside_range(tile, first, end)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _zero_lines(base: Any, row: Any, size: int) -> None:
    """Zeros this thread's 16 bytes of each line of a row of `size` bytes."""
    atom, row_in_atom = arith.divui(row, int32_constant(8)), arith.remui(row, int32_constant(8))
    address = arith.addi(
        base, arith.addi(arith.muli(atom, int32_constant(8 * size)), arith.muli(row_in_atom, int32_constant(LINE)))
    )
    for line in range(0, size, LINE):
        offset = arith.addi(address, int32_constant(8 * line))
        llvm.inline_asm(None, [offset, int32_constant(0)], STORE_PTX, "r,r", has_side_effects=True)


def store_rows(target: Any, tile: jax.Array, row: Any, column: Any, count: Any, first: Any = None) -> None:
    """Stores the first `count` rows of an accumulator directly to device memory, each thread its own elements.

    Bulk copies have a fixed number of rows; this slower way is for tiles with fewer.

    Args:
        target: Reference to [M, N] in device memory.
        tile: In an accumulator's layout.
        row: Row of the target for the tile's first row; int32, as the others.
        column: Column of the target for the tile's first column; columns from N on are skipped.
        count: Rows to store.
        first: Rows before this one are skipped, too.
    """
    number, columns = plgpu.Layout.WG_SPLAT(()), target.shape[1]
    first_rows = () if first is None else (first,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, number, number, number, *(number for _ in first_rows))
    )
    def store(_: Any, target: Any, tile: Any, *scalars: Any) -> None:
        index = ir.IndexType.get()
        row, column, count, *first_limits = (arith.index_cast(index, x.registers.item()) for x in scalars)
        width = arith.constant(index, ir.IntegerAttr.get(index, columns))

        def put(value: Any, position: Any) -> None:
            # Masked by element: rows from `count` on belong to another tile, which another block may be writing.
            target_column = arith.addi(column, position[1])
            is_stored = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, position[0], count),
                arith.cmpi(arith.CmpIPredicate.ult, target_column, width),
            )
            for limit in first_limits:
                is_stored = arith.andi(is_stored, arith.cmpi(arith.CmpIPredicate.sge, position[0], limit))
            with mgpu.utils.when(is_stored):
                memref.store(value, target, [arith.addi(row, position[0]), target_column])

        tile.foreach(put)

    store(target, tile, row, column, count, *first_rows)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_row_values(target: Any, rows: jax.Array, row: Any, first: Any, end: Any) -> None:
    """Stores one element per row, for rows from `first` to before `end`, directly to device memory.

    Args:
        target: Reference to [M] in device memory.
        rows: [64], in the layout of an accumulator's rows.
        row: Row of the target for the first of all rows; int32, as the others.
        first: The first row to store.
        end: The row after the last one to store.
    """
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW_LAYOUT, number, number, number))
    def store(_: Any, target: Any, rows: Any, *scalars: Any) -> None:
        index = ir.IndexType.get()
        row, first, end = (arith.index_cast(index, x.registers.item()) for x in scalars)

        def put(value: Any, position: Any) -> None:
            # The four threads of a row store the same value.
            is_stored = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, position[0], first),
                arith.cmpi(arith.CmpIPredicate.slt, position[0], end),
            )
            with mgpu.utils.when(is_stored):
                memref.store(value, target, [arith.addi(row, position[0])])

        rows.foreach(put)

    store(target, rows, row, first, end)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
