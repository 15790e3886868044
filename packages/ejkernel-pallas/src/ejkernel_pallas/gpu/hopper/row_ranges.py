"""Handles rows of a tile that belong to another tile: zeroes them in shared memory, and skips them in stores."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel_pallas.gpu.hopper.launch import wgmma_transforms
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type
from ejkernel_pallas.gpu.hopper.sizes import STORE_BYTES_PER_THREAD, THREADS_PER_WARPGROUP

LINE_BYTES = 128
"""Bytes of a row that are written at once. The swizzle permutes the pieces of a line by row, which does not matter for
zeros.
"""
THREADS_PER_LINE = LINE_BYTES // STORE_BYTES_PER_THREAD
"""Threads that write a line together."""
ROWS_PER_PASS = THREADS_PER_WARPGROUP // THREADS_PER_LINE
"""Rows of which a warpgroup writes one line at once."""
STORE_16_BYTES_PTX = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"


def zero_row(base_address: Any, row: Any, row_bytes: int, line_bytes: int = LINE_BYTES) -> None:
    """Writes zeros to a row of `row_bytes` bytes of a tile at an address: its lines are eight rows apart."""
    # Eight rows of a tile are `size / line` swizzle atoms of 8 x `line` bytes, one after the other.
    atom, row_in_atom = arith.divui(row, int32_constant(8)), arith.remui(row, int32_constant(8))
    address = arith.addi(base_address, arith.muli(atom, int32_constant(8 * row_bytes)))
    address = arith.addi(address, arith.muli(row_in_atom, int32_constant(line_bytes)))
    for first in range(0, row_bytes, line_bytes):
        for part in range(0, line_bytes, STORE_BYTES_PER_THREAD):
            offset = arith.addi(address, int32_constant(8 * first + part))
            llvm.inline_asm(None, [offset, int32_constant(0)], STORE_16_BYTES_PTX, "r,r", has_side_effects=True)


def zero_rows_outside(tile: Any, first_row: Any, end_row: Any) -> None:
    """Writes zeros to the rows of a tile before `first_row` and from `end_row` on.

    Args:
        tile: Reference to 16-bit elements [rows, size] in shared memory, in the layout of products.
        first_row: int32.
        end_row: int32.
    """
    rows, size = tile.shape
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(wgmma_transforms()), number, number))
    def zero_outside_range(_: Any, tile: Any, first_row: Any, end_row: Any) -> None:
        base = llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(tile))
        # Writes use the generic proxy: callers commit before a product reads them.
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        # Eight threads write a line, and a warp four neighbouring lines: 512 bytes without bank conflicts. With a
        # thread per row there would be eight-way conflicts, which would keep the tensor cores from shared memory
        # meanwhile.
        row, line_part = (
            arith.divui(thread, int32_constant(THREADS_PER_LINE)),
            arith.remui(thread, int32_constant(THREADS_PER_LINE)),
        )
        base = arith.addi(base, arith.muli(line_part, int32_constant(STORE_BYTES_PER_THREAD)))
        for pass_start in range(0, rows, ROWS_PER_PASS):
            tile_row = arith.addi(row, int32_constant(pass_start))
            is_before_first = arith.cmpi(arith.CmpIPredicate.slt, tile_row, first_row.registers.item())
            is_past_end = arith.cmpi(arith.CmpIPredicate.sge, tile_row, end_row.registers.item())
            in_tile = arith.cmpi(arith.CmpIPredicate.ult, tile_row, int32_constant(rows))
            with mgpu.utils.when(arith.andi(in_tile, arith.ori(is_before_first, is_past_end))):
                _zero_row_lines(base, tile_row, size * 2)

    zero_outside_range(tile, first_row, end_row)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _zero_row_lines(base_address: Any, row: Any, row_bytes: int) -> None:
    """Zeros this thread's 16 bytes of each line of a row of `row_bytes` bytes."""
    atom, row_in_atom = arith.divui(row, int32_constant(8)), arith.remui(row, int32_constant(8))
    address = arith.addi(
        base_address,
        arith.addi(
            arith.muli(atom, int32_constant(8 * row_bytes)), arith.muli(row_in_atom, int32_constant(LINE_BYTES))
        ),
    )
    for line in range(0, row_bytes, LINE_BYTES):
        offset = arith.addi(address, int32_constant(8 * line))
        llvm.inline_asm(None, [offset, int32_constant(0)], STORE_16_BYTES_PTX, "r,r", has_side_effects=True)


def store_rows(
    target: Any, tile: jax.Array, target_row: Any, target_column: Any, end_row: Any, first_stored_row: Any = None
) -> None:
    """Stores the first `end_row` rows of an accumulator directly to device memory, each thread its own elements.

    Bulk copies have a fixed number of rows; this slower way is for tiles with fewer.

    Args:
        target: Reference to [M, N] in device memory.
        tile: In an accumulator's layout.
        target_row: Row of the target for the tile's first row; int32, as the others.
        target_column: Column of the target for the tile's first column; columns from N on are skipped.
        end_row: Rows to store.
        first_stored_row: Rows before this one are skipped, too.
    """
    number, columns = plgpu.Layout.WG_SPLAT(()), target.shape[1]
    first_rows = () if first_stored_row is None else (first_stored_row,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, number, number, number, *(number for _ in first_rows))
    )
    def store(_: Any, target: Any, tile: Any, *scalars: Any) -> None:
        index = ir.IndexType.get()
        row, column, count, *first_limits = (arith.index_cast(index, x.registers.item()) for x in scalars)
        width = arith.constant(index, ir.IntegerAttr.get(index, columns))

        def store_element(value: Any, position: Any) -> None:
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

        tile.foreach(store_element)

    store(target, tile, target_row, target_column, end_row, *first_rows)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_row_values(target: Any, row_values: jax.Array, target_row: Any, first_stored_row: Any, end_row: Any) -> None:
    """Stores one element per row, for rows from `first_stored_row` to before `end_row`, directly to device memory.

    Args:
        target: Reference to [M] in device memory.
        row_values: [64], in the layout of an accumulator's rows.
        target_row: Row of the target for the first of all rows; int32, as the others.
        first_stored_row: The first row to store.
        end_row: The row after the last one to store.
    """
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW_LAYOUT, number, number, number))
    def store(_: Any, target: Any, rows: Any, *scalars: Any) -> None:
        index = ir.IndexType.get()
        row, first, end = (arith.index_cast(index, x.registers.item()) for x in scalars)

        def store_element(value: Any, position: Any) -> None:
            # The four threads of a row store the same value.
            is_stored = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, position[0], first),
                arith.cmpi(arith.CmpIPredicate.slt, position[0], end),
            )
            with mgpu.utils.when(is_stored):
                memref.store(value, target, [arith.addi(row, position[0])])

        rows.foreach(store_element)

    store(target, row_values, target_row, first_stored_row, end_row)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
