"""The gated product: the kernel of rows with a matrix [C, 2F] whose first half of columns gates the second half.

    matrix [C, 2F]     gate 0 | gate 1 | ...  || value 0 | value 1 | ...       64 columns each
    a stage            gate 0 | value 0 | gate 1 | value 1                     panels [64, 64], copied one by one
    accumulator        [64, 64] [64, 64]  [64, 64] [64, 64]                    one product of 256 columns
    output             act(gate 0) value 0 | act(gate 1) value 1               parts of 64 columns, in 16 bits

One product of both halves reads rows from shared memory once. A thread has the same columns of both, so that no data
moves between threads, and a product of any number of column blocks uses the first panels of a stage.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import rows_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.hopper import arrays, gating, wgmma
from ejkernel_pallas.gpu.hopper.sizes import I32, SWIZZLE_COLUMNS, WGMMA_M


def gated_grouped_matmul_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    rows_kernel(call, _multiply_tile)


def _multiply_tile(call: Call, tile: Tile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, gate, warpgroup = call.spec, call.spec.gate, lax.axis_index("warpgroup")
    assert gate is not None  # set for the gated product
    size, half = spec.tile.block_n, spec.tile.block_n // 2
    product, fits_64_rows = (
        functools.partial(_multiply_part, call, gate.activation, tile, steps_done),
        tile.end - tile.row <= WGMMA_M,
    )
    branches = FirstMatch()
    if gate.single_warpgroup:
        # The first warpgroup computes all rows. The other one would compute the same, which costs power.
        branches.when(fits_64_rows & (warpgroup > 0), functools.partial(_free_stages, call, steps_done))
    if spec.splits:
        branches.when(
            tile.half >= 0, functools.partial(product, SubTile(warpgroup, tile.half * half, half, split=True))
        )
    if spec.partial_tile_columns:
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.column + size > spec.columns,
            functools.partial(product, SubTile(warpgroup, 0, spec.partial_tile_columns)),
        )
    branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, size)))


def _multiply_part(call: Call, activation: str, tile: Tile, steps_done: Any, part: SubTile) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row = tile.first(part.rows)
    write_rows(call, _multiply_and_gate(call, activation, steps_done, part), row, tile.column + part.start, tile.end)


def _free_stages(call: Call, steps_done: Any) -> None:
    """Frees the stages of a tile that another warpgroup multiplies."""
    shared, stages = call.shared, call.spec.tile.stages

    def step(index: Any, carry: None) -> None:
        slot = lax.rem(steps_done + index, I32(stages))
        plgpu.barrier_wait(shared.full.at[slot])
        plgpu.barrier_arrive(shared.free.at[slot])

    lax.fori_loop(0, call.spec.steps, step, None)


def _multiply_and_gate(call: Call, activation: str, steps_done: Any, part: SubTile) -> list[jax.Array]:
    """Returns a warpgroup's part of a tile, gated: [64, 64] for every 64 columns."""
    spec, shared, stages = call.spec, call.shared, call.spec.tile.stages
    count = 2 * part.size // SWIZZLE_COLUMNS
    first = I32(0) if part.split else lax.div(I32(part.start), I32(SWIZZLE_COLUMNS // 2))

    def step(index: Any, acc: Any) -> Any:
        slot = lax.rem(steps_done + index, I32(stages))
        plgpu.barrier_wait(shared.full.at[slot])
        acc = wgmma.accumulate(acc, shared.a.at[slot * WARPGROUPS + part.rows], shared.b.at[slot, first])
        # One product stays in flight, so that the tensor cores do not idle; the previous one has read its stage.
        acc = wgmma.wait(acc, in_flight=1)
        last = lax.rem(steps_done + index + (stages - 1), I32(stages))
        pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
        return acc

    zeros = arrays.zero_tile((WGMMA_M, count * SWIZZLE_COLUMNS))
    acc = wgmma.wait(lax.fori_loop(0, spec.steps, step, zeros), in_flight=0)
    # Frees the stage of the last product, which no later step of this tile would free.
    plgpu.barrier_arrive(shared.free.at[lax.rem(steps_done + (spec.steps - 1), I32(stages))])
    blocks = [acc[:, n : n + SWIZZLE_COLUMNS] for n in range(0, acc.shape[1], SWIZZLE_COLUMNS)]
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [gating.gated(gate, other, activation) for gate, other in pairs]
