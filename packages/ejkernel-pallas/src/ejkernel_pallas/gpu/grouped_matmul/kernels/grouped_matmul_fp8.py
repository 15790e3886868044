"""Multiplies rows by the matrix of their group on Hopper, in 8 bits with scales (module `scaled_products`)."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatchingBranch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import accumulate_products, run_row_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import copy_pieces_out, split_into_pieces, write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import OutputTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.scaled_products import (
    WarpgroupRows,
    apply_step_invariant_scales,
    sum_scaled_products,
)
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS, ScaleConstants
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M


def grouped_matmul_fp8_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    run_row_kernel(call, _multiply_tile)


def _multiply_tile(call: Call, tile: OutputTile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, scale_constants, warpgroup = call.spec, call.spec.scale_constants, lax.axis_index("warpgroup")
    assert scale_constants is not None  # set for 8-bit operands
    tile_columns, half_tile_columns = spec.tile.block_n, spec.tile.block_n // 2
    product, fits_64_rows = (
        functools.partial(_multiply_sub_tile, call, scale_constants, tile, steps_done),
        tile.group_end - tile.first_row <= WGMMA_M,
    )
    branches = FirstMatchingBranch()
    if spec.may_split_last_tiles:
        branches.when(
            tile.column_half >= 0,
            functools.partial(
                product, SubTile(warpgroup, tile.column_half * half_tile_columns, half_tile_columns, is_half_tile=True)
            ),
        )
    if spec.partial_tile_columns:
        # For scaled products zero is an opaque offset (no row is negative): otherwise the compiler would hoist
        # addresses that the branches share into registers across their loops, and sums would spill.
        start = 0 if scale_constants.sums_on_tensor_cores else jnp.minimum(tile.first_row, 0)
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.first_column + tile_columns > spec.num_columns,
            functools.partial(product, SubTile(warpgroup, start, spec.partial_tile_columns)),
        )
    if scale_constants.split_by_columns:
        branches.when(
            fits_64_rows, functools.partial(_multiply_warpgroup_columns, call, scale_constants, tile, steps_done, 1)
        )
        branches.otherwise(
            functools.partial(_multiply_warpgroup_columns, call, scale_constants, tile, steps_done, CONSUMER_WARPGROUPS)
        )
    else:
        branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, tile_columns)))


def _multiply_sub_tile(
    call: Call, scale_constants: ScaleConstants, tile: OutputTile, steps_done: Any, sub_tile: SubTile
) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first_row_of_warpgroup(sub_tile.row_block_index)
    rows = WarpgroupRows((sub_tile.row_block_index,), (row,), steps_done)
    if scale_constants.sums_on_tensor_cores:
        results = apply_step_invariant_scales(
            call, scale_constants, [accumulate_products(call, steps_done, sub_tile)], rows, sub_tile.first_column
        )
    else:
        results = sum_scaled_products(call, scale_constants, rows, sub_tile)
    write_rows(call, results, row, tile.first_column + sub_tile.first_column, tile.group_end)


def _multiply_warpgroup_columns(
    call: Call, scale_constants: ScaleConstants, tile: OutputTile, steps_done: Any, num_row_blocks: int
) -> None:
    """Computes `num_row_blocks` times 64 rows, and the columns of one product."""
    first_rows, size = (
        tuple(tile.first_row_of_warpgroup(part) for part in range(num_row_blocks)),
        scale_constants.product_n,
    )
    start = lax.axis_index("warpgroup") * size
    row_parts = sum_scaled_products(
        call,
        scale_constants,
        WarpgroupRows(tuple(range(num_row_blocks)), first_rows, steps_done),
        SubTile(None, start, size),
    )
    if num_row_blocks == 1:
        return write_rows(call, row_parts, first_rows[0], tile.first_column + start, tile.group_end)
    # The group has more than 64 rows, so bulk copies can be used.
    pieces = [
        split_into_pieces(call, [acc], row, tile.first_column + start)
        for row, acc in zip(first_rows, row_parts, strict=True)
    ]
    copy_pieces_out(call, [piece for one in pieces for piece in one])
