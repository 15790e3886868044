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
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    replace_row_values,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, THREADS_PER_WARPGROUP, WGMMA_M

LANES_PER_WARP = 32
"""Threads per warp."""
ROWS_PER_THREAD = 2
"""Rows per thread."""
LANES_PER_ROW = 4
"""Lanes that share a row."""
COLUMN_STRIDE_BYTES = 8 * 4
"""Bytes between a thread's pairs of columns: eight columns of float32."""


def load_row_scales_from_hbm(scales: Any, row: Any, block_index: Any) -> jax.Array:
    """Returns the scales of 64 rows in a block of contracted elements, from device memory.

    Args:
        scales: Reference to float32 [M, blocks]; rows past M use the last row's scales.
        row: First row, int32.
        block_index: Index of the block, int32.
    """
    rows, scalar_layout = scales.shape[0], plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar_layout, scalar_layout),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any, row: Any, block_index: Any) -> Any:
        first = arith.addi(row.registers.item(), first_row_of_thread())
        values: list[Any] = []
        for half in (0, ROWS_PER_WARP // 2):
            scale_row = arith.minsi(arith.addi(first, int32_constant(half)), int32_constant(rows - 1))
            index = [arith.index_cast(ir.IndexType.get(), x) for x in (scale_row, block_index.registers.item())]
            values.append(memref.load(scales, index))
        return row_vector_from_thread_values(values)

    return load(scales, row, block_index)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_row_scales_from_smem(scales: Any, block_index: Any) -> jax.Array:
    """Returns the scales of 64 rows in one of the copied blocks, from shared memory.

    Args:
        scales: Reference to float32 [64, blocks].
        block_index: Index of the block, int32.
    """

    line = scales.shape[1] * 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any, block_index: Any) -> Any:
        base_address = llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(scales))
        base_address = arith.addi(base_address, arith.muli(block_index.registers.item(), int32_constant(4)))
        base_address = arith.addi(base_address, arith.muli(first_row_of_thread(), int32_constant(line)))
        return row_vector_from_thread_values(
            [_load_float(base_address, half * line) for half in (0, ROWS_PER_WARP // 2)]
        )

    return load(scales, block_index)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_scale_for_all_rows(scales: Any) -> jax.Array:
    """Returns the first element of a float32 vector in shared memory, for all rows of a warpgroup: float32 [64]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, scales: Any) -> Any:
        value = _load_pair(llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(scales)), 0)[0]
        return mgpu.FragmentedArray.splat(value, (WGMMA_M,), layout=mgpu.WGMMA_LAYOUT.reduce((1,)), is_signed=None)

    return load(scales)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def add_scaled_product(
    acc: jax.Array | None, product: jax.Array, row_scales: jax.Array | None, column_scales: Any
) -> jax.Array:
    """Returns acc + product * rows * columns.

    Args:
        acc: Float32 [64, N] in an accumulator's layout, or None for zeros.
        product: Float32 [64, N] in an accumulator's layout.
        row_scales: Float32 [64], a value for every row, or None for ones.
        column_scales: Reference to float32 [N] in shared memory, a value for every column, or None for ones.
    """
    inputs = [x for x in (product, acc, row_scales, column_scales) if x is not None]
    layouts = {"acc": plgpu.Layout.WGMMA, "rows": ROW_LAYOUT, "columns": plgpu.RefType()}
    optional_names = [
        name for name, x in (("acc", acc), ("rows", row_scales), ("columns", column_scales)) if x is not None
    ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(layouts[name] for name in optional_names)),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_: Any, product: Any, *arrays: Any) -> Any:
        refs_by_name, product_registers = dict(zip(optional_names, arrays, strict=True)), list(product.registers.flat)
        acc_registers = list(refs_by_name["acc"].registers.flat) if "acc" in refs_by_name else []
        row_factors = (
            [unpack_row_value(x) for x in refs_by_name["rows"].registers.flat]
            if "rows" in refs_by_name
            else [None] * ROWS_PER_THREAD
        )
        column_address = _first_column_address_of_thread(refs_by_name["columns"]) if "columns" in refs_by_name else None
        new_registers: list[Any] = []
        # Order of a thread's registers: a pair of columns of its first row, of its second row, then the next pair of
        # columns.
        for register_index in range(0, len(product_registers), ROWS_PER_THREAD):
            factors = (
                (None, None)
                if column_address is None
                else _load_pair(column_address, register_index // ROWS_PER_THREAD * COLUMN_STRIDE_BYTES)
            )
            for row, row_factor in enumerate(row_factors):
                old_sums = unpack_pair(acc_registers[register_index + row]) if acc_registers else (None, None)
                terms = zip(unpack_pair(product_registers[register_index + row]), factors, old_sums, strict=True)
                values = [_scale_and_add(x, (factor, row_factor), addend) for x, factor, addend in terms]
                new_registers.append(vector.from_elements(product_registers[register_index + row].type, values))
        return replace_registers(product, new_registers)

    return add(*inputs)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _scale_and_add(x: Any, factors: tuple[Any, ...], addend: Any) -> Any:
    """Returns x times the factors that are not None, plus `addend` if any: the last two in one instruction."""
    *first_factors, last = [factor for factor in factors if factor is not None] or [None]
    for factor in first_factors:
        x = arith.mulf(x, factor)
    if addend is None:
        return x if last is None else arith.mulf(x, last)
    return arith.addf(x, addend) if last is None else math.fma(x, last, addend)


def first_row_of_thread() -> Any:
    """Returns the first of the thread's rows among the 64."""
    thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
    warp, lane = (
        arith.divui(thread, int32_constant(LANES_PER_WARP)),
        arith.remui(thread, int32_constant(LANES_PER_WARP)),
    )
    return arith.addi(arith.muli(warp, int32_constant(ROWS_PER_WARP)), arith.divui(lane, int32_constant(LANES_PER_ROW)))


def row_vector_from_thread_values(values: list[Any]) -> Any:
    """Returns an array [64] from a thread's values."""
    zero_rows = mgpu.FragmentedArray.splat(
        float32_constant(0.0), (WGMMA_M,), layout=mgpu.WGMMA_LAYOUT.reduce((1,)), is_signed=None
    )
    return replace_row_values(zero_rows, values)


def _load_float(base_address: Any, offset: int) -> Any:
    """Loads an element from shared memory; it has side effects for the reason given in `_load_pair`."""
    code = f"ld.shared.f32 $0, [$1 + {offset}];"
    return llvm.inline_asm(ir.F32Type.get(), [base_address], code, "=f,r", has_side_effects=True)


def _first_column_address_of_thread(columns: Any) -> Any:
    """Returns the address of the thread's first pair of columns."""
    lane = arith.remui(mgpu.utils.thread_idx(), int32_constant(LANES_PER_ROW))
    address = llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(columns))
    return arith.addi(address, arith.muli(lane, int32_constant(COLUMN_STRIDE_BYTES // LANES_PER_ROW)))


def _load_pair(base_address: Any, offset: int) -> list[Any]:
    """Loads two neighbouring elements from shared memory.

    Declared with side effects, so that LLVM does not load all columns before it waits for the product: they would not
    fit the registers.
    """
    f32 = ir.F32Type.get()
    pair_type = llvm.StructType.get_literal([f32, f32])
    code = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    loaded_pair: Any = llvm.inline_asm(pair_type, [base_address], code, "=f,=f,r", has_side_effects=True)
    return [llvm.extractvalue(f32, loaded_pair, [n]) for n in range(2)]
