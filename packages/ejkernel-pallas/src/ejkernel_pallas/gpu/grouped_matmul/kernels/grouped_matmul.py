"""Multiplies rows by the matrix of their group on Hopper, in 16 bits: the forward pass, and the gradient of lhs."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import accumulated, issue_product, rows_kernel, step_and_free
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile, tile_of
from ejkernel_pallas.gpu.grouped_matmul.spec import LEAD
from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


def grouped_matmul_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    rows_kernel(call, _multiply_tile, _multiply_all_overlapped)


def _multiply_tile(call: Call, tile: Tile, done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, warpgroup = call.spec, lax.axis_index("warpgroup")
    size, half = spec.tile.block_n, spec.tile.block_n // 2
    product, few = functools.partial(_product, call, tile, done), tile.end - tile.row <= WGMMA_M
    branches = FirstMatch()
    if spec.tile.halves:
        # Both warpgroups compute the same 64 rows, and half of the columns each.
        branches.when(few, functools.partial(product, SubTile(I32(0), warpgroup * half, half)))
    if spec.splits:
        branches.when(
            tile.half >= 0, functools.partial(product, SubTile(warpgroup, tile.half * half, half, split=True))
        )
    if spec.tail:
        # Columns past the end of the output are not multiplied.
        branches.when(tile.column + size > spec.columns, functools.partial(product, SubTile(warpgroup, 0, spec.tail)))
    branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, size)))


def _product(call: Call, tile: Tile, done: Any, part: SubTile) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first(part.rows)
    acc = accumulated(call, done, part)
    write_rows(call, [acc], row, tile.column + part.start, tile.end)


def _multiply_all_overlapped(call: Call, before: Any, count: Any, every: Any) -> None:
    """Loops over all tiles of a consumer; each tile is stored during the first products of the next one."""
    spec = call.spec
    # A dummy tile before the first: it ends at row 0, so nothing of it is stored.
    nothing = arrays.full_tile((WGMMA_M, spec.tile.block_n)).astype(spec.out), I32(0), I32(0), I32(0)
    last = every(functools.partial(_multiply_overlapped, call, before, count), count, *nothing)
    write_rows(call, [last[1]], *last[2:])


def _multiply_overlapped(call: Call, before: Any, count: Any, carry: Any) -> Any:
    """Computes a warpgroup's part of a tile in registers, storing the previous tile during the first products."""
    number, done, *left = carry
    tile, spec, warpgroup = tile_of(call, before, count, number), call.spec, lax.axis_index("warpgroup")
    part, shared = SubTile(warpgroup, 0, spec.tile.block_n), call.shared
    lead = min(LEAD, spec.steps)

    def products(acc: Any) -> Any:
        lax.fori_loop(0, lead, lambda index, _: issue_product(call, done + index, part, acc), None)
        # The previous tile is stored while the tensor cores work: its registers are 16-bit, next to the accumulator's.
        write_rows(call, [left[0]], *left[1:])
        # All but the last of the first `lead` products have read their stages.
        plgpu.wgmma_wait(1)
        for index in range(lead - 1):
            plgpu.barrier_arrive(shared.free.at[lax.rem(done + index, I32(spec.tile.stages))])
        lax.fori_loop(lead, spec.steps, functools.partial(step_and_free, call, part, acc), done + lead)
        return acc[...]

    made = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((WGMMA_M, part.size), jnp.float32)).astype(spec.out)
    done = done + spec.steps
    plgpu.barrier_arrive(shared.free.at[lax.rem(done - 1, I32(spec.tile.stages))])
    return number + call.blocks, done, made, tile.first(warpgroup), tile.column, tile.end
