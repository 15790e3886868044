"""Float32 sums of products with scales: acc + product * rows * columns, in registers.

thread        rows lane / 4 and lane / 4 + 8, columns 2 (lane mod 4) and the next, of every 8
a column pair one load from shared memory, which eight lanes share; four elements,
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
"""Threads per warp."""
ROWS = 2
"""Rows per thread."""
QUAD = 4
"""Lanes that share a row."""
COLUMN_BYTES = 8 * 4
"""Bytes between a thread's pairs of columns: eight columns of float32."""


def load_scales(scales: Any, row: Any, block: Any) -> jax.Array:
    """Returns the scales of 64 rows in a block of contracted elements, from device memory.

    Args:
        scales: Reference to float32 [M, blocks]; rows past M use the last row's scales.
        row: First row, int32.
        block: Index of the block, int32.
    """
    rows, number_layout = scales.shape[0], plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), number_layout, number_layout),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any, row: Any, block: Any) -> Any:
        first = arith.addi(row.registers.item(), _thread_row())
        values: list[Any] = []
        for half in (0, WARP_ROWS // 2):
            place = arith.minsi(arith.addi(first, constant(half)), constant(rows - 1))
            index = [arith.index_cast(ir.IndexType.get(), x) for x in (place, block.registers.item())]
            values.append(memref.load(scales, index))
        return _of_thread_rows(values)

    return load(scales, row, block)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_copied(scales: Any, block: Any) -> jax.Array:
    """Returns the scales of 64 rows in one of the copied blocks, from shared memory.

    Args:
        scales: Reference to float32 [64, blocks].
        block: Index of the block, int32.
    """

    line = scales.shape[1] * 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any, block: Any) -> Any:
        base = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(scales))
        base = arith.addi(base, arith.muli(block.registers.item(), constant(4)))
        base = arith.addi(base, arith.muli(_thread_row(), constant(line)))
        return _of_thread_rows([_float_at(base, half * line) for half in (0, WARP_ROWS // 2)])

    return load(scales, block)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_scalar(scales: Any) -> jax.Array:
    """Returns the first element of a float32 vector in shared memory, for all rows of a warpgroup: float32 [64]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any) -> Any:
        value = _pair_at(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(scales)), 0)[0]
        return mgpu.FragmentedArray.splat(value, (WGMMA_M,), layout=mgpu.WGMMA_LAYOUT.reduce((1,)), is_signed=None)

    return load(scales)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def add_scaled(acc: jax.Array | None, product: jax.Array, rows: jax.Array | None, columns: Any) -> jax.Array:
    """Returns acc + product * rows * columns.

    Args:
        acc: Float32 [64, N] in an accumulator's layout, or None for zeros.
        product: Float32 [64, N] in an accumulator's layout.
        rows: Float32 [64], a value for every row, or None for ones.
        columns: Reference to float32 [N] in shared memory, a value for every column, or None for ones.
    """
    given = [x for x in (product, acc, rows, columns) if x is not None]
    layouts = {"acc": plgpu.Layout.WGMMA, "rows": ROW_LAYOUT, "columns": plgpu.RefType()}
    others = [name for name, x in (("acc", acc), ("rows", rows), ("columns", columns)) if x is not None]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(layouts[name] for name in others)),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_: Any, product: Any, *arrays: Any) -> Any:
        named, new = dict(zip(others, arrays, strict=True)), list(product.registers.flat)
        before = list(named["acc"].registers.flat) if "acc" in named else []
        of_row = [scalar(x) for x in named["rows"].registers.flat] if "rows" in named else [None] * ROWS
        base = _thread_columns(named["columns"]) if "columns" in named else None
        made: list[Any] = []
        # Order of a thread's registers: a pair of columns of its first row, of its second row, then the next pair of
        # columns.
        for place in range(0, len(new), ROWS):
            factors = (None, None) if base is None else _pair_at(base, place // ROWS * COLUMN_BYTES)
            for row, factor_of_row in enumerate(of_row):
                totals = pair(before[place + row]) if before else (None, None)
                triples = zip(pair(new[place + row]), factors, totals, strict=True)
                values = [_sum(x, (factor, factor_of_row), total) for x, factor, total in triples]
                made.append(vector.from_elements(new[place + row].type, values))
        return with_registers(product, made)

    return add(*given)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _sum(x: Any, factors: tuple[Any, ...], total: Any) -> Any:
    """Returns x times the factors that are not None, plus `total` if any: the last two in one instruction."""
    *rest, last = [factor for factor in factors if factor is not None] or [None]
    for factor in rest:
        x = arith.mulf(x, factor)
    if total is None:
        return x if last is None else arith.mulf(x, last)
    return arith.addf(x, total) if last is None else math.fma(x, last, total)


def _thread_row() -> Any:
    """Returns the first of the thread's rows among the 64."""
    thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
    warp, lane = arith.divui(thread, constant(LANES)), arith.remui(thread, constant(LANES))
    return arith.addi(arith.muli(warp, constant(WARP_ROWS)), arith.divui(lane, constant(QUAD)))


def _of_thread_rows(values: list[Any]) -> Any:
    """Returns an array [64] from a thread's values."""
    like = mgpu.FragmentedArray.splat(number(0.0), (WGMMA_M,), layout=mgpu.WGMMA_LAYOUT.reduce((1,)), is_signed=None)
    return of_rows(like, values)


def _float_at(base: Any, offset: int) -> Any:
    """Loads an element from shared memory; it has side effects for the reason given in `_pair_at`."""
    code = f"ld.shared.f32 $0, [$1 + {offset}];"
    return llvm.inline_asm(ir.F32Type.get(), [base], code, "=f,r", has_side_effects=True)


def _thread_columns(columns: Any) -> Any:
    """Returns the address of the thread's first pair of columns."""
    lane = arith.remui(mgpu.utils.thread_idx(), constant(QUAD))
    address = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(columns))
    return arith.addi(address, arith.muli(lane, constant(COLUMN_BYTES // QUAD)))


def _pair_at(base: Any, offset: int) -> list[Any]:
    """Loads two neighbouring elements from shared memory.

    Declared with side effects, so that LLVM does not load all columns before it waits for the product: they would not
    fit the registers.
    """
    f32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([f32, f32])
    code = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    loaded: Any = llvm.inline_asm(struct, [base], code, "=f,=f,r", has_side_effects=True)
    return [llvm.extractvalue(f32, loaded, [n]) for n in range(2)]
