"""The producer warpgroup of the kernels of rows: copies rows, matrices and scales to shared memory, step by step.

    free stage -> rows of each warpgroup | columns of a matrix | their scales -> full stage

Contiguous rows are copied in bulk, gathered rows by copies of 16 bytes. The gate and the values of a gated matrix are
copied separately, in panels of 64 columns (module `panels`).
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels import panels, scaled_products, work_queue
from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import Tile, single_rows, tile_of
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.hopper import clusters, row_gathers
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M


class Kind(NamedTuple):
    """Selects the parts of a tile that its steps copy.

    Attributes:
        half: Whether only half of the columns are copied.
        single: Whether only the first 64 rows are copied.
    """

    half: bool = False
    single: bool = False


def fetch_tile(call: Call, before: Any, count: Any, carry: Any) -> Any:
    """Copies all steps of a tile."""
    number, done = carry
    tile, spec = tile_of(call, before, count, number), call.spec
    firsts = [tile.first(warpgroup) for warpgroup in range(WARPGROUPS)]
    places = _find_rows(call, firsts) if spec.gathers else None
    requested = work_queue.request(call, number)

    def fetch(kind: Kind) -> None:
        lax.fori_loop(0, spec.steps, functools.partial(_fetch_step, call, tile, firsts, places, kind), done)

    # One loop per kind: with a branch inside the loop, the copies' operands would be moved to uniform registers in
    # every step.
    branches = FirstMatch()
    if spec.splits and not spec.gate:
        branches.when(tile.half >= 0, functools.partial(fetch, Kind(half=True)))
    single = single_rows(call, tile)
    if single is not None:
        branches.when(single, functools.partial(fetch, Kind(single=True)))
    branches.otherwise(functools.partial(fetch, Kind()))
    return work_queue.publish(call, requested, done), done + spec.steps


def _fetch_step(call: Call, tile: Tile, firsts: list[Any], places: Any, kind: Kind, index: Any, done: Any) -> Any:
    """Copies a step once its stage is free."""
    spec, shared = call.spec, call.shared
    slot = lax.rem(done, I32(spec.tile.stages))
    # `done` counts the steps of all tiles: the ring of stages continues into the next tile, whose first copies overlap
    # with the end of this one. The first round finds the stages free.
    pl.when(done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
    inner = pl.ds(index * spec.step, spec.step)
    if places is None:
        _fetch_rows(call, firsts, kind, inner, slot)
    else:
        row_gathers.copy_rows(call.operands["lhs"], places, index, shared.a.at[slot * WARPGROUPS])
    if spec.gate:
        panels.fetch_panels(call, tile, inner, slot)
    else:
        _fetch_matrix(call, tile, kind, inner, slot)
    if spec.scaling:
        scaled_products.fetch_scales(
            call, spec.scaling, scaled_products.ScaleIndex(tile.matrix, tile.column, index, done), firsts
        )
    if places is not None:
        # One step later, so that copies of two steps are in flight.
        pl.when(done > 0)(lambda: gathered(call, done - 1, in_flight=1))
    return done + 1


def gathered(call: Call, done: Any, *, in_flight: int) -> None:
    """Signals that the gathered rows of a step have arrived; `in_flight` later steps may still be in flight."""
    row_gathers.wait_rows(in_flight)
    plgpu.barrier_arrive(call.shared.full.at[lax.rem(done, I32(call.spec.tile.stages))])


def _find_rows(call: Call, firsts: list[Any]) -> Any:
    """Returns the addresses of the tile's rows that each thread copies."""
    lhs, spec = call.operands["lhs"], call.spec
    return row_gathers.find_rows(call.operands["indices"], firsts, spec.contracted * spec.dtype.itemsize, lhs.shape[0])


def _fetch_rows(call: Call, firsts: list[Any], kind: Kind, inner: Any, slot: Any) -> None:
    """Copies a step of each warpgroup's contiguous rows."""
    shared, full = call.shared, call.shared.full.at[slot]
    axes = clusters.AXIS if call.spec.tile.cluster_n > 1 else None  # each member reads one half for both
    for warpgroup, first in enumerate(firsts):
        if kind.single and warpgroup:
            plgpu.barrier_arrive(full)
            continue
        # Copied by rows, not by swizzle atoms of eight rows: a group may start at any row.
        source, target = call.operands["lhs"].at[pl.ds(first, WGMMA_M), inner], slot * WARPGROUPS + warpgroup
        plgpu.copy_gmem_to_smem(source, shared.a_lines.at[target], full, collective_axes=axes)


def _fetch_matrix(call: Call, tile: Tile, kind: Kind, inner: Any, slot: Any) -> None:
    """Copies a step of the matrix's columns."""
    spec, shared, size = call.spec, call.shared, call.spec.tile.block_n
    begin, target = tile.column, shared.b.at[slot]
    if kind.half:
        size //= 2
        begin, target = begin + tile.half * size, shared.b_half.at[2 * slot]
    across = pl.ds(begin, size)
    part = (across, inner) if spec.transposed else (inner, across)
    source = call.operands["rhs"].at[tile.matrix, *part]
    copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, shared.full.at[slot])
    if spec.tile.cluster_m > 1:
        # Tiles of one group: each member copies half of the matrix for both. At the boundary of two groups each copies
        # its own.
        pl.when(tile.shared)(functools.partial(copy, collective_axes=clusters.AXIS))
        pl.when(~tile.shared)(copy)
    else:
        copy()
