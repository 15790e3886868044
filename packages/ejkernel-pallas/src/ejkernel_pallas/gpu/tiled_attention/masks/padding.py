"""Zeros in place of what padding holds, in a tile that lies in shared memory."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel_pallas.gpu.hopper.launch import transforms
from ejkernel_pallas.gpu.hopper.registers import constant
from ejkernel_pallas.gpu.hopper.sizes import THREADS

LINE = 128
"""Bytes of a row that lie together, unless said. The order of its parts differs from row to row, which zeros do not
show."""
PART = 16
"""Bytes that a thread writes at a time."""
STORE = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"


def clean_rows(tile: Any, ids: Any, line: int = LINE) -> None:
    """Writes zeros to the rows of a tile whose ids are below zero.

    Args:
        tile: Reference to 16-bit numbers [rows, size] in shared memory, in the order that products read.
        ids: Reference to int32 [rows] in device memory.
        line: Bytes of a row that lie together: of the swizzle.
    """
    rows, size = tile.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(line)), plgpu.RefType()))
    def clean(_: Any, tile: Any, ids: Any) -> None:
        base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(tile))
        first = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        for start in range(0, rows, THREADS):
            row = arith.addi(first, constant(start))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, constant(rows))):
                number = memref.load(ids, [arith.index_cast(ir.IndexType.get(), row)])
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, number, constant(0))):
                    _write_zeros(base, row, size * 2, line)

    clean(tile, ids)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _write_zeros(base: Any, row: Any, size: int, line: int) -> None:
    """Zeros in a row of `size` bytes: its lines lie eight rows apart."""
    eight, within = arith.divui(row, constant(8)), arith.remui(row, constant(8))
    place = arith.addi(base, arith.muli(eight, constant(8 * size)))
    place = arith.addi(place, arith.muli(within, constant(line)))
    for first in range(0, size, line):
        for part in range(0, line, PART):
            offset = arith.addi(place, constant(8 * first + part))
            llvm.inline_asm(None, [offset, constant(0)], STORE, "r,r", has_side_effects=True)
