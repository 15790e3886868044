"""Multiplies rows by the matrix of their group on Hopper, in 8 bits with scales (module `scaled_products`)."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import accumulate_products, rows_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import copy_pieces_out, split_into_pieces, write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile
from ejkernel_pallas.gpu.grouped_matmul.kernels.scaled_products import (
    WarpgroupRows,
    apply_common_scales,
    sum_scaled_products,
)
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS, Scaling
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M


def grouped_matmul_fp8_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    rows_kernel(call, _multiply_tile)


def _multiply_tile(call: Call, tile: Tile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, scaling, warpgroup = call.spec, call.spec.scaling, lax.axis_index("warpgroup")
    assert scaling is not None  # set for 8-bit operands
    tile_columns, half_tile_columns = spec.tile.block_n, spec.tile.block_n // 2
    product, fits_64_rows = (
        functools.partial(_multiply_part, call, scaling, tile, steps_done),
        tile.end - tile.row <= WGMMA_M,
    )
    branches = FirstMatch()
    if spec.splits:
        branches.when(
            tile.half_index >= 0,
            functools.partial(
                product, SubTile(warpgroup, tile.half_index * half_tile_columns, half_tile_columns, split=True)
            ),
        )
    if spec.partial_tile_columns:
        # For scaled products zero is an opaque offset (no row is negative): otherwise the compiler would hoist
        # addresses that the branches share into registers across their loops, and sums would spill.
        start = 0 if scaling.sums_on_tensor_cores else jnp.minimum(tile.row, 0)
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.column + tile_columns > spec.columns,
            functools.partial(product, SubTile(warpgroup, start, spec.partial_tile_columns)),
        )
    if scaling.split_by_columns:
        branches.when(fits_64_rows, functools.partial(_multiply_columns, call, scaling, tile, steps_done, 1))
        branches.otherwise(functools.partial(_multiply_columns, call, scaling, tile, steps_done, WARPGROUPS))
    else:
        branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, tile_columns)))


def _multiply_part(call: Call, scaling: Scaling, tile: Tile, steps_done: Any, part: SubTile) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first(part.rows)
    rows = WarpgroupRows((part.rows,), (row,), steps_done)
    if scaling.sums_on_tensor_cores:
        results = apply_common_scales(call, scaling, [accumulate_products(call, steps_done, part)], rows, part.start)
    else:
        results = sum_scaled_products(call, scaling, rows, part)
    write_rows(call, results, row, tile.column + part.start, tile.end)


def _multiply_columns(call: Call, scaling: Scaling, tile: Tile, steps_done: Any, parts: int) -> None:
    """Computes `parts` times 64 rows, and the columns of one product."""
    first_rows, size = tuple(tile.first(part) for part in range(parts)), scaling.product_n
    start = lax.axis_index("warpgroup") * size
    row_parts = sum_scaled_products(
        call, scaling, WarpgroupRows(tuple(range(parts)), first_rows, steps_done), SubTile(None, start, size)
    )
    if parts == 1:
        return write_rows(call, row_parts, first_rows[0], tile.column + start, tile.end)
    # The group has more than 64 rows, so bulk copies can be used.
    pieces = [
        split_into_pieces(call, [acc], row, tile.column + start) for row, acc in zip(first_rows, row_parts, strict=True)
    ]
    copy_pieces_out(call, [piece for one in pieces for piece in one])
