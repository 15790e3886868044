"""The producer warpgroup of the forward kernel: fetches tile indices, and copies queries, keys and values by TMA.

    per work tile   K(0) | Q | K(1) | V(0) | K(2) | V(1) | ... | K(n-1) | V(n-2) | V(n-1)

Keys are one block ahead of values, in the order in which consumers need them: S(j) before P(j-1) V(j-1).
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call, next_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.padding import zero_padding_rows


def produce(call: Call, carry: Any) -> Any:
    """Copies the operands of one work tile, keys one block ahead of values."""
    nth_tile, step, number, (start, _, _, stop) = carry
    item = tile_scheduler.work_tile(call.plan, number)
    # A whole tile ahead, so that the latency of the atomic overlaps with the copies.
    fetch_next(call, nth_tile)
    fetch, key_block = functools.partial(_copy_block, call, item), functools.partial(call.key_block, item)
    fetch("k", key_block(start), step)
    for warpgroup in range(call.tile.warpgroups):
        _fetch_queries(call, item, nth_tile, warpgroup)
    next_item = next_tile(call, nth_tile)

    def pair(index: Any, count: Any) -> Any:
        fetch("k", key_block(index + 1), count + 1)
        _fetch_values(call, item, key_block(index), count)
        return count + 1

    count = lax.fori_loop(start, stop - 1, pair, step)
    _fetch_values(call, item, key_block(stop - 1), count)
    return nth_tile + 1, count + 1, *next_item


def _copy_block(
    call: Call, item: tile_scheduler.WorkTile, operand_name: str, index: Any, count: Any, should_copy: Any = None
) -> None:
    """Copies a block of keys or of values once its stage is free; the first `stages` are free from the start."""
    shared, slot = call.shared, call.slot(count)
    buffer, full, free = (getattr(shared, f"{operand_name}{part}") for part in ("", "_full", "_free"))
    pl.when(count >= call.tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    should_copy = full.at[slot] if should_copy is None else should_copy
    rows, head = pl.ds(index * call.tile.keys, call.tile.keys), lax.div(item.head, I32(call.spec.group_size))
    source = call.operands[operand_name]
    plgpu.copy_gmem_to_smem(source.at[item.row(source), rows, head], buffer.at[slot], should_copy)
    if operand_name == "k" and call.spec.has_dropout:
        numbers = call.operands["k_dropout_keys"]
        plgpu.copy_gmem_to_smem(numbers.at[item.row(numbers), rows], call.key_block_dropout_keys(count), should_copy)


def _fetch_values(call: Call, item: tile_scheduler.WorkTile, index: Any, count: Any) -> None:
    """Copies a block of values, and zeroes those of padding: a weight of zero times NaN is NaN."""
    fetch = functools.partial(_copy_block, call, item, "v", index, count)
    if not call.spec.segments:
        return fetch()
    shared, slot = call.shared, call.slot(count)
    padded, ids = call.operands["padded"], call.operands["k_ids"]
    padded = padded[item.row(padded), index] > 0
    pl.when(~padded)(fetch)

    @pl.when(padded)
    def _zero_padding_values() -> None:
        # Uses a separate mbarrier: consumers must not see the stage before its padding is overwritten.
        fetch(shared.v_raw)
        plgpu.barrier_wait(shared.v_raw)
        rows = pl.ds(index * call.tile.keys, call.tile.keys)
        zero_padding_rows(shared.v.at[slot], ids.at[item.row(ids), rows])
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.v_full.at[slot])


def _fetch_queries(call: Call, item: tile_scheduler.WorkTile, nth_tile: Any, warpgroup: int) -> None:
    """Copies the queries of a warpgroup once their buffer is free."""
    shared, buffer = call.shared, call.buffer(nth_tile, warpgroup)
    pl.when(nth_tile >= call.tile.buffers)(lambda: plgpu.barrier_wait(shared.q_free.at[buffer]))
    rows, full = pl.ds(item.tile * call.tile.queries + warpgroup * WGMMA_M, WGMMA_M), shared.q_full.at[buffer]
    source = call.operands["q"]
    plgpu.copy_gmem_to_smem(source.at[item.row(source), rows, item.head], shared.q.at[buffer], full)
    if call.spec.has_dropout:
        numbers = call.operands["q_dropout_keys"]
        plgpu.copy_gmem_to_smem(numbers.at[item.row(numbers), item.head, rows], shared.q_dropout_keys.at[buffer], full)
    if call.spec.segments:
        ranges = call.operands["ranges"]
        plgpu.copy_gmem_to_smem(ranges.at[item.row(ranges), :, rows], shared.ranges.at[buffer], full)


def fetch_next(call: Call, nth_tile: Any) -> None:
    """Fetches the index of the next work tile."""
    shared, place = call.shared, lax.rem(nth_tile, I32(2))
    # Two slots, since warpgroups may still read the last index; both are free from the start.
    pl.when(nth_tile > 1)(lambda: plgpu.barrier_wait(shared.number_free.at[place]))
    tile_scheduler.fetch_next(call.plan, call.tile_counter, shared.number.at[place])
    plgpu.barrier_arrive(shared.number_full.at[place])
