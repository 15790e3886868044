"""Float32 sums of products that have scales of their own: acc + product * rows * columns, in registers.

thread        rows lane / 4 and 8 more, columns 2 (lane mod 4) and the next, of every 8
a column pair one load of shared memory, which the eight lanes above one another share; four elements,
              a multiplication and a fused multiply-add each
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import constant, i32, number, of_rows, pair, scalar, with_registers
from ejkernel_pallas.gpu.hopper.sizes import THREADS, WARP_ROWS, WGMMA_M

LANES = 32
"""Threads of a warp."""
QUAD = 4
"""Lanes that have the columns of a row."""
COLUMN_BYTES = 8 * 4
"""From a thread's columns to its next ones: eight columns of float32."""


def load_scales(scales: Any, row: Any, block: Any) -> jax.Array:
    """The scales of 64 rows in a block of contracted elements, from device memory.

    Args:
        scales: Reference to float32 [M, blocks]; rows from M on are given the last row's.
        row: First row, int32.
        block: Number of the block, int32.
    """
    rows, number_layout = scales.shape[0], plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), number_layout, number_layout),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any, row: Any, block: Any) -> Any:
        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        warp, lane = arith.divui(thread, constant(LANES)), arith.remui(thread, constant(LANES))
        first = arith.addi(row.registers.item(), arith.muli(warp, constant(WARP_ROWS)))
        first = arith.addi(first, arith.divui(lane, constant(QUAD)))
        values: list[Any] = []
        for half in (0, WARP_ROWS // 2):
            place = arith.minsi(arith.addi(first, constant(half)), constant(rows - 1))
            index = [arith.index_cast(ir.IndexType.get(), x) for x in (place, block.registers.item())]
            values.append(memref.load(scales, index))
        like = mgpu.FragmentedArray.splat(
            number(0.0), (WGMMA_M,), layout=mgpu.WGMMA_LAYOUT.reduce((1,)), is_signed=None
        )
        return of_rows(like, values)

    return load(scales, row, block)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def add_scaled(acc: jax.Array, product: jax.Array, rows: jax.Array, columns: Any) -> jax.Array:
    """acc + product * rows * columns.

    Args:
        acc: Float32 [64, N] in an accumulator's layout.
        product: Likewise.
        rows: Float32 [64], a value for every row.
        columns: Reference to float32 [N] in shared memory, a value for every column.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, ROW_LAYOUT, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_: Any, acc: Any, product: Any, rows: Any, columns: Any) -> Any:
        of_row = [scalar(register) for register in rows.registers.flat]
        lane = arith.remui(mgpu.utils.thread_idx(), constant(QUAD))
        base = arith.addi(
            llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(columns)), arith.muli(lane, constant(COLUMN_BYTES // QUAD))
        )
        made: list[Any] = []
        before, new = list(acc.registers.flat), list(product.registers.flat)
        # Registers of a thread: its first row's pair of columns, its second row's, and the next pair of columns.
        for place in range(0, len(new), len(of_row)):
            factors = _column_pair(base, place // len(of_row) * COLUMN_BYTES)
            for row, factor_of_row in enumerate(of_row):
                triples = zip(pair(new[place + row]), factors, pair(before[place + row]), strict=True)
                values = [math.fma(arith.mulf(x, factor), factor_of_row, total) for x, factor, total in triples]
                made.append(vector.from_elements(before[place + row].type, values))
        return with_registers(acc, made)

    return add(acc, product, rows, columns)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _column_pair(base: Any, offset: int) -> list[Any]:
    """Two neighbours in shared memory.

    Side effects keep LLVM from loading all columns before the product is waited for: there are no registers for them.
    """
    f32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([f32, f32])
    code = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    loaded: Any = llvm.inline_asm(struct, [base], code, "=f,=f,r", has_side_effects=True)
    return [llvm.extractvalue(f32, loaded, [n]) for n in range(2)]
