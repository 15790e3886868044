"""Copies a gated matrix's panels of 64 columns: gate 0 | value 0 | gate 1 | value 1 ..., one after the other."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS


def copy_gate_panels(call: Call, tile: Tile, k_slice: Any, slot: Any) -> None:
    """Copies a step's panels of the gate and of the values."""
    spec, shared = call.spec, call.shared
    full, count = shared.full.at[slot], spec.panels
    begin = tile.column
    if spec.splits:
        begin = begin + jnp.maximum(tile.half, 0) * (spec.tile.block_n // 2)
    for number in range(count):
        block, other = divmod(number, 2)
        column_tiles = pl.ds(begin + (block * SWIZZLE_COLUMNS + other * spec.columns), SWIZZLE_COLUMNS)
        source, target = call.operands["rhs"].at[tile.matrix, k_slice, column_tiles], shared.b.at[slot, number]

        def copy(source: Any = source, target: Any = target) -> None:
            plgpu.copy_gmem_to_smem(source, target, full)

        if spec.splits and number >= count // 2:
            # Half a tile has half of the panels, but the mbarrier counts all of them.
            pl.when(tile.half < 0)(copy)
            pl.when(tile.half >= 0)(lambda: plgpu.barrier_arrive(full))
        else:
            copy()
