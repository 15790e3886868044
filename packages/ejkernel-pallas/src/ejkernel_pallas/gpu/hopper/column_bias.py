"""Loads a bias of an accumulator's columns: the same value in all rows of a column.

A thread has the columns 2 (lane mod 4) and the next of every eight, and loads them as pairs: half as many registers as
an accumulator has, since its two rows share them.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel_pallas.gpu.hopper.registers import float32_constant, int32_constant, replace_registers
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M

LANES_PER_ROW = 4
"""Lanes that share a row."""
THREAD_COLUMN_STRIDE = 8
"""Columns between a thread's pairs of columns."""
FLOAT32_BYTES = 4
"""Bytes of a float32."""


def load_bias(bias: Any, matrix: Any, first_columns: list[Any]) -> jax.Array:
    """Returns float32 [64, 64 panels] in an accumulator's layout, whose rows all are a bias.

    Args:
        bias: Reference to float32 [E, N] in device memory, N even.
        matrix: Index of the bias, int32.
        first_columns: First column of every panel of 64 columns, int32, even.
    """
    shape, columns, splat = (WGMMA_M, SWIZZLE_COLUMNS * len(first_columns)), bias.shape[1], plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), splat, *(splat for _ in first_columns)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, bias: Any, matrix: Any, *first_columns: Any) -> Any:
        like = mgpu.FragmentedArray.splat(float32_constant(0.0), shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        i64 = ir.IntegerType.get_signless(64)
        lane = arith.remui(mgpu.utils.thread_idx(), int32_constant(LANES_PER_ROW))
        row = arith.muli(matrix.registers.item(), int32_constant(columns))
        begin = arith.addi(row, arith.muli(lane, int32_constant(2)))
        base, pairs = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(bias)), list[Any]()
        for start in first_columns:
            first = arith.extui(i64, arith.addi(begin, start.registers.item()))
            address = arith.addi(base, arith.muli(first, arith.constant(i64, ir.IntegerAttr.get(i64, FLOAT32_BYTES))))
            pairs += [_load_pair(address, column) for column in range(0, SWIZZLE_COLUMNS, THREAD_COLUMN_STRIDE)]
        # Registers alternate between a thread's two rows.
        kind = like.registers.flat[0].type
        return replace_registers(like, [vector.from_elements(kind, values) for values in pairs for _ in range(2)])

    return load(bias, matrix, *first_columns)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _load_pair(address: Any, column: int) -> list[Any]:
    """Loads two neighbouring elements, `column` elements after an address.

    Declared with side effects, so that LLVM does not move it to where the bias is added, after the products.
    """
    f32 = ir.F32Type.get()
    code = f"ld.global.nc.v2.f32 {{$0, $1}}, [$2 + {column * FLOAT32_BYTES}];"
    loaded: Any = llvm.inline_asm(
        llvm.StructType.get_literal([f32, f32]), [address], code, "=f,=f,l", has_side_effects=True
    )
    return [llvm.extractvalue(f32, loaded, [n]) for n in range(2)]
