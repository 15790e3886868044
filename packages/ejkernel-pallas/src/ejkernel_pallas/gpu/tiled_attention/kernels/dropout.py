"""Dropout of a tile's weights: products of precomputed keys of rows and columns decide which weights are kept.

A weight takes a multiplication, a comparison, and a selection or another multiplication. The scale of kept weights is
applied once per row.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.families.tiled_attention import TiledAttention, make_dropout_keys
from ejkernel_pallas.gpu.hopper.layouts import COLUMN_LAYOUT, ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    as_int32,
    float32_constant,
    int32_constant,
    replace_registers,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

DROPPED_WEIGHT = {"bfloat16": 2.0**-40, "float16": 2.0**-24}
"""Stands for zero as a dropped weight in the backward pass: small enough not to change sums of weights.

Float16 has no smaller number. If all cotangents have one sign, dv is too large by this times the number of dropped
weights: with 32768 keys and dropout 0.1 by a factor 0.0002, with 131072 keys and dropout 0.5 by 0.008.
"""
ZERO_IF_BELOW_PTX = "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p mul.f32 $0, $0, 0f00000000; }"
"""PTX: multiplies a number by zero if one word is below another."""


def dropout_key_operands(record: TiledAttention, spec: HopperSpec, queries: int, keys: int) -> dict[str, jax.Array]:
    """Returns uint32 keys of queries [B, H, T] and of keys [1, S], padded to whole tiles; none without dropout.

    Args:
        record: The call.
        spec: Its kernel's constants.
        queries: Queries per tile.
        keys: Keys per tile.
    """
    if not spec.has_dropout:
        return {}
    dropout_keys = make_dropout_keys(record)
    padding = [
        [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % n)] for x, n in zip(dropout_keys, (queries, keys), strict=True)
    ]
    return {
        name: jnp.pad(x, n)
        for name, x, n in zip(("q_dropout_keys", "k_dropout_keys"), dropout_keys, padding, strict=True)
    }


def zero_dropped_weights(spec: HopperSpec, rows: jax.Array, columns: jax.Array, weights: jax.Array) -> Any:
    """Returns weights [rows, columns] with dropped ones set to zero.

    It multiplies instead of selecting: selections, comparisons and conversions run on one unit, which would be busier
    than the matrix unit. Weights are finite.

    Args:
        spec: The kernel's constants.
        rows: Uint32 keys of the rows.
        columns: Uint32 keys of the columns.
        weights: Float32.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW_LAYOUT, COLUMN_LAYOUT, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def multiply_dropped_by_zero(_: Any, rows: Any, columns: Any, tile: Any) -> Any:
        new_registers: list[Any] = []
        for register, products in zip(tile.registers.flat, _row_and_column_key_products(rows, columns), strict=True):
            operands = (
                [weight, n, _keep_threshold(spec)] for weight, n in zip(unpack_pair(register), products, strict=True)
            )
            values: list[Any] = [
                llvm.inline_asm(each[0].type, each, ZERO_IF_BELOW_PTX, "=f,0,r,n") for each in operands
            ]
            new_registers.append(vector.from_elements(register.type, values))
        return replace_registers(tile, new_registers)

    return multiply_dropped_by_zero(rows, columns, weights)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def select_by_dropout(
    spec: HopperSpec, rows: jax.Array, columns: jax.Array, *kept_and_dropped_values: tuple[Any, Any]
) -> list[Any]:
    """Returns tiles with one value where dropout keeps a weight, and another where it drops the weight.

    Comparisons are scalar: Mosaic's own, of pairs, have results in bytes, and twice as many instructions.

    Args:
        spec: The kernel's constants.
        rows: Uint32 keys of the rows.
        columns: Uint32 keys of the columns.
        kept_and_dropped_values: For every tile the values of kept and of dropped weights: float32 [rows, columns], or a
            number.
    """
    shape = rows.shape[0], columns.shape[0]
    tiles = [
        plgpu.layout_cast(jnp.broadcast_to(x, shape), plgpu.Layout.WGMMA)
        for both in kept_and_dropped_values
        for x in both
    ]

    @plgpu.inline_mgpu(
        arg_types=(ROW_LAYOUT, COLUMN_LAYOUT, *(plgpu.Layout.WGMMA for _ in tiles)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA) for _ in kept_and_dropped_values
        ),
    )
    def select_registers(_: Any, rows: Any, columns: Any, *tiles: Any) -> Any:
        new_registers: list[list[Any]] = [[] for _ in kept_and_dropped_values]
        places = zip(*(tile.registers.flat for tile in tiles), strict=True)
        for registers, products in zip(places, _row_and_column_key_products(rows, columns), strict=True):
            # One comparison for all tiles: the gradient has the same mask as the weight.
            is_kept = [arith.cmpi(arith.CmpIPredicate.uge, product, _keep_threshold(spec)) for product in products]
            for n, tile_registers in enumerate(new_registers):
                both = zip(is_kept, *(unpack_pair(x) for x in registers[2 * n : 2 * n + 2]), strict=True)
                values = [arith.select(condition, x, y) for condition, x, y in both]
                tile_registers.append(vector.from_elements(registers[0].type, values))
        return tuple(replace_registers(tiles[0], values) for values in new_registers)

    return select_registers(rows, columns, *tiles)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _row_and_column_key_products(rows: Any, columns: Any) -> Iterator[list[Any]]:
    """Yields the products of row and column keys for every register of a tile; dropout keeps those not below the
    limit.
    """
    row_keys = [unpack_row_value(x) for x in rows.registers.flat]
    # Registers of a tile are row by row within a pair of columns, so a column's key is used for two of them.
    for met in map(unpack_pair, columns.registers.flat):
        for row in row_keys:
            yield [arith.muli(row, column) for column in met]


def _keep_threshold(spec: HopperSpec) -> Any:
    return int32_constant(as_int32(spec.dropout_threshold))


def select_by_sign(signs: jax.Array, tile: jax.Array, columns: jax.Array) -> Any:
    """Returns a tile in which element [i, j] is replaced by `columns[j]` where `signs[i, j]` is negative.

    Args:
        signs: Float32 [rows, columns].
        tile: Likewise.
        columns: Float32 [columns].
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, COLUMN_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def select_registers(_: Any, signs: Any, tile: Any, columns: Any) -> Any:
        new_registers: list[Any] = []
        for place, registers in enumerate(zip(signs.registers.flat, tile.registers.flat, strict=True)):
            operands = zip(*(unpack_pair(x) for x in (*registers, columns.registers.flat[place // 2])), strict=True)
            negative = arith.CmpFPredicate.OLT
            values = [arith.select(arith.cmpf(negative, sign, float32_constant(0.0)), y, x) for sign, x, y in operands]
            new_registers.append(vector.from_elements(registers[0].type, values))
        return replace_registers(tile, new_registers)

    return select_registers(signs, tile, columns)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
