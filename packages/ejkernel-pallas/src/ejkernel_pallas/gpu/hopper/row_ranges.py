"""Rows of a tile that another owns: zeros in their place in shared memory, and stores that leave them alone."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel_pallas.gpu.hopper.launch import transforms
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import constant, i32
from ejkernel_pallas.gpu.hopper.sizes import THREADS

LINE = 128
"""Bytes of a row that lie together. The order of its parts differs from row to row, which zeros do not show."""
STORE_BYTES = 16
"""Bytes that a thread writes at a time."""
LINE_THREADS = LINE // STORE_BYTES
"""Threads that write a line together."""
PASS_ROWS = THREADS // LINE_THREADS
"""Rows in which a warpgroup writes a line each at a time."""
STORE = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"


def write_zeros(base: Any, row: Any, size: int, line: int = LINE) -> None:
    """Zeros in a row of `size` bytes of a tile at an address: its lines lie eight rows apart."""
    # Eight rows of a tile are `size / line` swizzle atoms of 8 x `line` bytes, one after the other.
    eight, within = arith.divui(row, constant(8)), arith.remui(row, constant(8))
    place = arith.addi(base, arith.muli(eight, constant(8 * size)))
    place = arith.addi(place, arith.muli(within, constant(line)))
    for first in range(0, size, line):
        for part in range(0, line, STORE_BYTES):
            offset = arith.addi(place, constant(8 * first + part))
            llvm.inline_asm(None, [offset, constant(0)], STORE, "r,r", has_side_effects=True)


def zero_rows(tile: Any, first: Any, end: Any) -> None:
    """Writes zeros to the rows of a tile before `first` and from `end` on.

    Args:
        tile: Reference to 16-bit numbers [rows, size] in shared memory, in the order that products read.
        first: int32.
        end: int32.
    """
    rows, size = tile.shape
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms()), number, number))
    def clean(_: Any, tile: Any, first: Any, end: Any) -> None:
        base = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile))
        # Writes are by the generic proxy: callers commit before a product reads them.
        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        # Eight threads write a line, and a warp four neighbours: 512 bytes without a bank conflict. A thread a row
        # would meet seven others in its banks, and keep the tensor cores from shared memory all that time.
        row, part = arith.divui(thread, constant(LINE_THREADS)), arith.remui(thread, constant(LINE_THREADS))
        base = arith.addi(base, arith.muli(part, constant(STORE_BYTES)))
        for passed in range(0, rows, PASS_ROWS):
            here = arith.addi(row, constant(passed))
            before = arith.cmpi(arith.CmpIPredicate.slt, here, first.registers.item())
            after = arith.cmpi(arith.CmpIPredicate.sge, here, end.registers.item())
            inside = arith.cmpi(arith.CmpIPredicate.ult, here, constant(rows))
            with mgpu.utils.when(arith.andi(inside, arith.ori(before, after))):
                _zero_lines(base, here, size * 2)

    clean(tile, first, end)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _zero_lines(base: Any, row: Any, size: int) -> None:
    """A thread's 16 bytes of each line of a row of `size` bytes."""
    eight, within = arith.divui(row, constant(8)), arith.remui(row, constant(8))
    place = arith.addi(base, arith.addi(arith.muli(eight, constant(8 * size)), arith.muli(within, constant(LINE))))
    for line in range(0, size, LINE):
        offset = arith.addi(place, constant(8 * line))
        llvm.inline_asm(None, [offset, constant(0)], STORE, "r,r", has_side_effects=True)


def store_rows(target: Any, tile: jax.Array, row: Any, column: Any, count: Any, first: Any = None) -> None:
    """Stores the first `count` rows of an accumulator straight to device memory, each thread its own elements.

    Bulk copies have a fixed number of rows; this is for tiles with fewer, and slower.

    Args:
        target: Reference to [M, N] in device memory.
        tile: In an accumulator's layout.
        row: Of the target, that the tile's first is; int32, as the others.
        column: Likewise; columns from N on are left out.
        count: Rows to store.
        first: Rows before this one are left out, too.
    """
    number, columns = plgpu.Layout.WG_SPLAT(()), target.shape[1]
    begins = () if first is None else (first,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, number, number, number, *(number for _ in begins))
    )
    def store(_: Any, target: Any, tile: Any, *numbers: Any) -> None:
        index = ir.IndexType.get()
        row, column, count, *begin = (arith.index_cast(index, x.registers.item()) for x in numbers)
        width = arith.constant(index, ir.IntegerAttr.get(index, columns))

        def put(value: Any, place: Any) -> None:
            # Masked by element: rows from `count` on are another tile's, which another block may be writing.
            across = arith.addi(column, place[1])
            keep = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, place[0], count),
                arith.cmpi(arith.CmpIPredicate.ult, across, width),
            )
            for limit in begin:
                keep = arith.andi(keep, arith.cmpi(arith.CmpIPredicate.sge, place[0], limit))
            with mgpu.utils.when(keep):
                memref.store(value, target, [arith.addi(row, place[0]), across])

        tile.foreach(put)

    store(target, tile, row, column, count, *begins)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_row_numbers(target: Any, rows: jax.Array, row: Any, first: Any, end: Any) -> None:
    """Stores a number a row, those from `first` to before `end`, straight to device memory.

    Args:
        target: Reference to [M] in device memory.
        rows: [64], in the layout of an accumulator's rows.
        row: Of the target, that the first of all rows is; int32, as the others.
        first: The first row to store.
        end: Behind the last one.
    """
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW_LAYOUT, number, number, number))
    def store(_: Any, target: Any, rows: Any, *numbers: Any) -> None:
        index = ir.IndexType.get()
        row, first, end = (arith.index_cast(index, x.registers.item()) for x in numbers)

        def put(value: Any, place: Any) -> None:
            # The four threads of a row store the same number.
            keep = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, place[0], first), arith.cmpi(arith.CmpIPredicate.slt, place[0], end)
            )
            with mgpu.utils.when(keep):
                memref.store(value, target, [arith.addi(row, place[0])])

        rows.foreach(put)

    store(target, rows, row, first, end)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
