"""Multiplies rows by the matrix of their group on Hopper, in 16 bits: the forward pass, and the gradient of lhs."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatchingBranch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import (
    accumulate_products,
    issue_product,
    issue_product_and_free_previous_stage,
    run_row_kernel,
)
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import OutputTile, load_output_tile
from ejkernel_pallas.gpu.grouped_matmul.spec import PRODUCTS_DURING_STORE
from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


def grouped_matmul_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    run_row_kernel(call, _multiply_tile, _multiply_all_overlapped)


def _multiply_tile(call: Call, tile: OutputTile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, warpgroup = call.spec, lax.axis_index("warpgroup")
    tile_columns, half_tile_columns = spec.tile.block_n, spec.tile.block_n // 2
    product, fits_64_rows = (
        functools.partial(_multiply_sub_tile, call, tile, steps_done),
        tile.group_end - tile.first_row <= WGMMA_M,
    )
    branches = FirstMatchingBranch()
    if spec.tile.half_columns:
        # Both warpgroups compute the same 64 rows, and half of the columns each.
        branches.when(
            fits_64_rows, functools.partial(product, SubTile(I32(0), warpgroup * half_tile_columns, half_tile_columns))
        )
    if spec.may_split_last_tiles:
        branches.when(
            tile.column_half >= 0,
            functools.partial(
                product, SubTile(warpgroup, tile.column_half * half_tile_columns, half_tile_columns, is_half_tile=True)
            ),
        )
    if spec.partial_tile_columns:
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.first_column + tile_columns > spec.num_columns,
            functools.partial(product, SubTile(warpgroup, 0, spec.partial_tile_columns)),
        )
    branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, tile_columns)))


def _multiply_sub_tile(call: Call, tile: OutputTile, steps_done: Any, sub_tile: SubTile) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first_row_of_warpgroup(sub_tile.row_block_index)
    acc = accumulate_products(call, steps_done, sub_tile)
    write_rows(call, [acc], row, tile.first_column + sub_tile.first_column, tile.group_end)


def _multiply_all_overlapped(call: Call, first_group_tile_row: Any, num_tile_rows: Any, for_each_tile: Any) -> None:
    """Loops over all tiles of a consumer; each tile is stored during the first products of the next one."""
    spec = call.spec
    # A dummy tile before the first: it ends at row 0, so nothing of it is stored.
    no_tile = arrays.zero_tile((WGMMA_M, spec.tile.block_n)).astype(spec.out_dtype), I32(0), I32(0), I32(0)
    last = for_each_tile(
        functools.partial(_multiply_tile_and_store_previous, call, first_group_tile_row, num_tile_rows),
        num_tile_rows,
        *no_tile,
    )
    write_rows(call, [last[1]], *last[2:])


def _multiply_tile_and_store_previous(call: Call, first_group_tile_row: Any, num_tile_rows: Any, carry: Any) -> Any:
    """Computes a warpgroup's part of a tile in registers, storing the previous tile during the first products."""
    number, steps_done, *previous_tile = carry
    tile, spec, warpgroup = (
        load_output_tile(call, first_group_tile_row, num_tile_rows, number),
        call.spec,
        lax.axis_index("warpgroup"),
    )
    part, shared = SubTile(warpgroup, 0, spec.tile.block_n), call.shared_memory
    products_during_store = min(PRODUCTS_DURING_STORE, spec.steps_per_tile)

    def multiply_and_store_previous(acc: Any) -> Any:
        lax.fori_loop(
            0, products_during_store, lambda index, _: issue_product(call, steps_done + index, part, acc), None
        )
        # The previous tile is stored while the tensor cores work: its registers are 16-bit, next to the accumulator's.
        write_rows(call, [previous_tile[0]], *previous_tile[1:])
        # All but the last of the first `products_during_store` products have read their stages.
        plgpu.wgmma_wait(1)
        for index in range(products_during_store - 1):
            plgpu.barrier_arrive(shared.operands_free.at[lax.rem(steps_done + index, I32(spec.tile.stages))])
        lax.fori_loop(
            products_during_store,
            spec.steps_per_tile,
            functools.partial(issue_product_and_free_previous_stage, call, part, acc),
            steps_done + products_during_store,
        )
        return acc[...]

    tile_values = pl.run_scoped(
        multiply_and_store_previous, plgpu.WGMMAAccumulatorRef((WGMMA_M, part.num_columns), jnp.float32)
    ).astype(spec.out_dtype)
    steps_done = steps_done + spec.steps_per_tile
    plgpu.barrier_arrive(shared.operands_free.at[lax.rem(steps_done - 1, I32(spec.tile.stages))])
    return (
        number + call.num_blocks,
        steps_done,
        tile_values,
        tile.first_row_of_warpgroup(warpgroup),
        tile.first_column,
        tile.group_end,
    )
