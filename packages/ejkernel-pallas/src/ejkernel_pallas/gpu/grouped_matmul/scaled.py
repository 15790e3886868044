"""Products of 8-bit rows and matrices that have scales: a float32 sum of every 128 contracted elements.

    tensor cores     | WG 0, columns 0.. | WG 1, columns 0.. | WG 0, columns BP.. | WG 1 ...
    warpgroup 0      issue, wait ........| scale and add ....| issue, wait .......| scale ...
    warpgroup 1      ....................| issue, wait ......| scale and add .....| ...

The tensor cores sum 8-bit products at about 14 bits, and scales of a block multiply its product alone. So a warpgroup's
64 rows have two accumulators: the tile's sums, and the product of a step with a part of the columns. While one
warpgroup scales its product, the other's runs: `ping_pong` passes the tensor cores back and forth.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS, Scaling
from ejkernel_pallas.gpu.hopper import arrays, wgmma
from ejkernel_pallas.gpu.hopper.ping_pong import ping_pong_pass, ping_pong_wait
from ejkernel_pallas.gpu.hopper.scaled_sums import add_scaled, load_scales
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

I32 = jnp.int32


class Place(NamedTuple):
    """Where the scales of a step's columns are: matrix, first column, the step, and steps before it of all tiles."""

    matrix: Any
    column: Any
    step: Any
    done: Any


def begin(scaling: Scaling, warpgroup: Any) -> None:
    """The last warpgroup lets the first one begin."""
    if scaling.ping_pong:
        pl.when(warpgroup == WARPGROUPS - 1)(lambda: ping_pong_pass(WARPGROUPS))


def fetch_scales(call: Call, scaling: Scaling, place: Place) -> None:
    """Copies the scales of a step's columns."""
    block, columns = _block(call, scaling.rhs_blocks, place.step), pl.ds(place.column, call.spec.tile.block_n)
    shared, full = call.shared, call.shared.full.at[lax.rem(place.done, I32(call.spec.tile.stages))]
    target = shared.columns.at[_slot(call, place.done)]
    plgpu.copy_gmem_to_smem(call.operands["rhs_scale"].at[place.matrix, block, columns], target, full)


def sums(call: Call, scaling: Scaling, row: Any, done: Any, width: int) -> list[jax.Array]:
    """Sums of a warpgroup's rows over all steps, for each part of the columns [64, product_n].

    Args:
        call: What the kernel is given.
        scaling: Of the operands.
        row: The first of the 64 rows.
        done: Steps before the tile.
        width: How many of the tile's columns the output has.
    """
    spec, shared, warpgroup = call.spec, call.shared, lax.axis_index("warpgroup")
    size = scaling.product_n

    def load(index: Any) -> jax.Array:
        return load_scales(call.operands["lhs_scale"], row, _block(call, scaling.lhs_blocks, index))

    def step(index: Any, carry: Any) -> Any:
        *before, rows, done = carry
        slot, scales = lax.rem(done, I32(spec.tile.stages)), _slot(call, done)
        # Prefetched: a load takes as long as a product, as copies keep the memory busy and the L1 cache is small.
        next_rows = load(jnp.minimum(index + 1, spec.steps - 1))
        plgpu.barrier_wait(shared.full.at[slot])
        after: list[jax.Array] = []
        for part, acc in enumerate(before):
            columns = pl.ds(part * size, size)
            if scaling.ping_pong:
                ping_pong_wait(WARPGROUPS)
            made = wgmma.issue(shared.a.at[slot * WARPGROUPS + warpgroup], shared.b.at[slot, columns])
            if scaling.ping_pong:
                # Issued, not finished: the other warpgroup's product queues up behind it.
                ping_pong_pass(WARPGROUPS)
            made = wgmma.wait(made, in_flight=0)
            if part == len(before) - 1:
                plgpu.barrier_arrive(shared.free.at[slot])
            after.append(add_scaled(acc, made, rows, shared.columns.at[scales, columns]))
        return (*after, next_rows, done + 1)

    zeros = [arrays.full_tile((WGMMA_M, size)) for _ in range(-(-width // size))]
    return list(lax.fori_loop(0, spec.steps, step, (*zeros, load(I32(0)), done))[:-2])


def _slot(call: Call, done: Any) -> Any:
    """Where the scales of a step are in shared memory.

    They have a slot more than operands: those of a step are read when its stage is free already, and overwritten after
    the next stage is.
    """
    return lax.rem(done, I32(call.spec.tile.stages + 1))


def _block(call: Call, blocks: int, index: Any) -> Any:
    """The block of contracted elements that a step is in."""
    return lax.div(index, I32(call.spec.steps // blocks))
