"""Zeroes padding rows of a tile in shared memory."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel_pallas.gpu.hopper.launch import wgmma_transforms
from ejkernel_pallas.gpu.hopper.registers import int32_constant
from ejkernel_pallas.gpu.hopper.row_ranges import LINE_BYTES, zero_row
from ejkernel_pallas.gpu.hopper.sizes import THREADS_PER_WARPGROUP


def zero_padding_rows(tile: Any, ids: Any, line_bytes: int = LINE_BYTES) -> None:
    """Writes zeros to the rows of a tile whose ids are negative.

    Args:
        tile: Reference to 16-bit elements [rows, size] in shared memory, in the layout of products.
        ids: Reference to int32 [rows] in device memory.
        line_bytes: The swizzle in bytes.
    """
    rows, size = tile.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(wgmma_transforms(line_bytes)), plgpu.RefType()))
    def zero_padding(_: Any, tile: Any, ids: Any) -> None:
        base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(tile))
        first = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        # One thread per row: few rows are padding, and the other threads are done after one load.
        for start in range(0, rows, THREADS_PER_WARPGROUP):
            row = arith.addi(first, int32_constant(start))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, int32_constant(rows))):
                number = memref.load(ids, [arith.index_cast(ir.IndexType.get(), row)])
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, number, int32_constant(0))):
                    zero_row(base, row, size * 2, line_bytes)

    zero_padding(tile, ids)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
