"""Multiplies rows by the matrix of their group on Hopper, in 8 bits with scales (module `scaled_products`)."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import accumulated, rows_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import copy_out, pieces_of, write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile
from ejkernel_pallas.gpu.grouped_matmul.kernels.scaled_products import Rows, scaled_tiles, sums
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS, Scaling
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M


def grouped_matmul_fp8_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    rows_kernel(call, _multiply_tile)


def _multiply_tile(call: Call, tile: Tile, done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, scaling, warpgroup = call.spec, call.spec.scaling, lax.axis_index("warpgroup")
    assert scaling is not None  # set for 8-bit operands
    size, half = spec.tile.block_n, spec.tile.block_n // 2
    product, few = functools.partial(_product, call, scaling, tile, done), tile.end - tile.row <= WGMMA_M
    branches = FirstMatch()
    if spec.splits:
        branches.when(
            tile.half >= 0, functools.partial(product, SubTile(warpgroup, tile.half * half, half, split=True))
        )
    if spec.tail:
        # For scaled products zero is an opaque offset (no row is negative): otherwise the compiler would hoist
        # addresses that the branches share into registers across their loops, and sums would spill.
        start = 0 if scaling.quick else jnp.minimum(tile.row, 0)
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.column + size > spec.columns, functools.partial(product, SubTile(warpgroup, start, spec.tail))
        )
    if scaling.by_columns:
        branches.when(few, functools.partial(_product_of_columns, call, scaling, tile, done, 1))
        branches.otherwise(functools.partial(_product_of_columns, call, scaling, tile, done, WARPGROUPS))
    else:
        branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, size)))


def _product(call: Call, scaling: Scaling, tile: Tile, done: Any, part: SubTile) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first(part.rows)
    rows = Rows((part.rows,), (row,), done)
    if scaling.quick:
        results = scaled_tiles(call, scaling, [accumulated(call, done, part)], rows, part.start)
    else:
        results = sums(call, scaling, rows, part)
    write_rows(call, results, row, tile.column + part.start, tile.end)


def _product_of_columns(call: Call, scaling: Scaling, tile: Tile, done: Any, parts: int) -> None:
    """Computes `parts` times 64 rows, and the columns of one product."""
    firsts, size = tuple(tile.first(part) for part in range(parts)), scaling.product_n
    start = lax.axis_index("warpgroup") * size
    made = sums(call, scaling, Rows(tuple(range(parts)), firsts, done), SubTile(None, start, size))
    if parts == 1:
        return write_rows(call, made, firsts[0], tile.column + start, tile.end)
    # The group has more than 64 rows, so bulk copies can be used.
    pieces = [pieces_of(call, [acc], row, tile.column + start) for row, acc in zip(firsts, made, strict=True)]
    copy_out(call, [piece for one in pieces for piece in one])
