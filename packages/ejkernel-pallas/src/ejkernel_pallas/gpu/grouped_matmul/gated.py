"""Products whose first half of the columns gates the second: what rows.py does otherwise with a gated matrix [C, 2F].

    matrix [C, 2F]     gate 0 | gate 1 | ...  || other 0 | other 1 | ...       64 columns each
    a stage            gate 0 | other 0 | gate 1 | other 1                     panels [64, 64], copied one by one
    accumulator        [64, 64] [64, 64]  [64, 64] [64, 64]                    one product of 256 columns
    output             act(gate 0) other 0 | act(gate 1) other 1               parts of 64 columns, in 16 bits

One product of both halves reads rows from shared memory once. A thread has the same columns of both, so that nothing
moves between threads, and every number of column blocks is a product of the first panels of a stage.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.scaled import Part
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.grouped_matmul.tiles import Tile
from ejkernel_pallas.gpu.hopper import arrays, gating, wgmma
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M

I32 = jnp.int32


def fetch_panels(call: Call, tile: Tile, inner: Any, slot: Any) -> None:
    """Copies a step's panels of the gate and of what it gates."""
    spec, shared = call.spec, call.shared
    full, count = shared.full.at[slot], spec.panels
    begin = tile.column
    if spec.splits:
        begin = begin + jnp.maximum(tile.half, 0) * (spec.tile.block_n // 2)
    for number in range(count):
        block, other = divmod(number, 2)
        across = pl.ds(begin + (block * SWIZZLE_COLUMNS + other * spec.columns), SWIZZLE_COLUMNS)
        source, target = call.operands["rhs"].at[tile.matrix, inner, across], shared.b.at[slot, number]

        def copy(source: Any = source, target: Any = target) -> None:
            plgpu.copy_gmem_to_smem(source, target, full)

        if spec.splits and number >= count // 2:
            # Half a tile has half of the panels, and the barrier counts all of them.
            pl.when(tile.half < 0)(copy)
            pl.when(tile.half >= 0)(lambda: plgpu.barrier_arrive(full))
        else:
            copy()


def products(call: Call, activation: str, done: Any, part: Part) -> list[jax.Array]:
    """A warpgroup's part of a tile, gated: for every 64 columns [64, 64]."""
    spec, shared, stages = call.spec, call.shared, call.spec.tile.stages
    count = 2 * part.size // SWIZZLE_COLUMNS
    first = I32(0) if part.split else lax.div(I32(part.start), I32(SWIZZLE_COLUMNS // 2))

    def step(index: Any, acc: Any) -> Any:
        slot = lax.rem(done + index, I32(stages))
        plgpu.barrier_wait(shared.full.at[slot])
        acc = wgmma.accumulate(acc, shared.a.at[slot * WARPGROUPS + part.rows], shared.b.at[slot, first])
        # One product stays in flight, so the tensor cores never run dry; the one before has read its stage.
        acc = wgmma.wait(acc, in_flight=1)
        last = lax.rem(done + index + (stages - 1), I32(stages))
        pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
        return acc

    zeros = arrays.full_tile((WGMMA_M, count * SWIZZLE_COLUMNS))
    acc = wgmma.wait(lax.fori_loop(0, spec.steps, step, zeros), in_flight=0)
    # The stage of the last product, which no later step of this tile frees.
    plgpu.barrier_arrive(shared.free.at[lax.rem(done + (spec.steps - 1), I32(stages))])
    blocks = [acc[:, n : n + SWIZZLE_COLUMNS] for n in range(0, acc.shape[1], SWIZZLE_COLUMNS)]
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [gating.gated(gate, other, activation) for gate, other in pairs]
