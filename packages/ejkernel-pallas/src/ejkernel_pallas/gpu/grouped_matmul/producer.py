"""The producer warpgroup of rows.py: what copies rows, matrices and scales to shared memory, a step after the other.

    free stage -> rows of each warpgroup | the part of a matrix | its columns' scales -> full stage

Rows come by bulk copies where they follow each other, and by copies of 16 bytes where they are gathered. Parts of a
gated matrix are copied from two places, in panels of 64 columns (gated.py).
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul import dealing, gated, scaled
from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.grouped_matmul.tiles import Tile, single_rows, tile_of
from ejkernel_pallas.gpu.hopper import clusters, row_gathers
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

I32 = jnp.int32


def fetch_tile(call: Call, before: Any, count: Any, carry: Any) -> Any:
    """Fetches all steps of a tile."""
    number, done = carry
    tile, spec, shared = tile_of(call, before, count, number), call.spec, call.shared
    firsts = [tile.first(warpgroup) for warpgroup in range(WARPGROUPS)]
    places = _find_rows(call, firsts) if spec.gathers else None
    after = dealing.take(call, number)

    def step(index: Any, done: Any) -> Any:
        slot = lax.rem(done, I32(spec.tile.stages))
        # `done` counts the steps of all tiles: the ring of stages runs on into the next tile, whose first copies
        # overlap with the end of this one. The first round finds the stages free.
        pl.when(done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
        inner = pl.ds(index * spec.step, spec.step)
        if places is None:
            _fetch_rows(call, tile, firsts, inner, slot)
        else:
            row_gathers.copy_rows(call.operands["lhs"], places, index, shared.a.at[slot * WARPGROUPS])
        if spec.gate:
            gated.fetch_panels(call, tile, inner, slot)
        else:
            _fetch_matrix(call, tile, inner, slot)
        if spec.scaling:
            scaled.fetch_scales(call, spec.scaling, scaled.Place(tile.matrix, tile.column, index, done), firsts)
        if places is not None:
            # A step later, so that copies of two steps are in flight.
            pl.when(done > 0)(lambda: gathered(call, done - 1, in_flight=1))
        return done + 1

    last = lax.fori_loop(0, spec.steps, step, done)
    return dealing.tell(call, after, done), last


def gathered(call: Call, done: Any, *, in_flight: int) -> None:
    """Says that the gathered rows of a step are there; so many later steps may still be on their way."""
    row_gathers.wait_rows(in_flight)
    plgpu.barrier_arrive(call.shared.full.at[lax.rem(done, I32(call.spec.tile.stages))])


def _find_rows(call: Call, firsts: list[Any]) -> Any:
    """Where the rows of a tile lie, for each thread those that it copies."""
    lhs, spec = call.operands["lhs"], call.spec
    return row_gathers.find_rows(call.operands["indices"], firsts, spec.contracted * spec.dtype.itemsize, lhs.shape[0])


def _fetch_rows(call: Call, tile: Tile, firsts: list[Any], inner: Any, slot: Any) -> None:
    """Copies a step of each warpgroup's rows, which follow each other."""
    shared, single = call.shared, single_rows(call, tile)
    for warpgroup, first in enumerate(firsts):
        # By lines, not by swizzle atoms of eight rows: a group may begin at any row.
        source, target = call.operands["lhs"].at[pl.ds(first, WGMMA_M), inner], slot * WARPGROUPS + warpgroup
        axes = clusters.AXIS if call.spec.tile.cluster_n > 1 else None  # each member reads a half for both
        full = shared.full.at[slot]
        copy = functools.partial(plgpu.copy_gmem_to_smem, source, shared.a_lines.at[target], full, collective_axes=axes)
        if single is None or not warpgroup:
            copy()
            continue
        pl.when(~single)(copy)
        pl.when(single)(functools.partial(plgpu.barrier_arrive, full))


def _fetch_matrix(call: Call, tile: Tile, inner: Any, slot: Any) -> None:
    """Copies a step of the matrix's columns."""
    spec, shared, size = call.spec, call.shared, call.spec.tile.block_n
    rhs, full, across = call.operands["rhs"], shared.full.at[slot], pl.ds(tile.column, size)
    part = (across, inner) if spec.transposed else (inner, across)
    copy = functools.partial(plgpu.copy_gmem_to_smem, rhs.at[tile.matrix, *part], shared.b.at[slot], full)
    if spec.splits:
        across = pl.ds(tile.column + tile.half * (size // 2), size // 2)
        part = (across, inner) if spec.transposed else (inner, across)
        half = functools.partial(plgpu.copy_gmem_to_smem, rhs.at[tile.matrix, *part], shared.b_half.at[2 * slot], full)
        pl.when(tile.half < 0)(copy)
        pl.when(tile.half >= 0)(half)
    elif spec.tile.cluster_m > 1:
        # Tiles of one group: each member copies half of the matrix for both. At the seam of two groups each has its
        # own.
        pl.when(tile.shared)(functools.partial(copy, collective_axes=clusters.AXIS))
        pl.when(~tile.shared)(copy)
    else:
        copy()
