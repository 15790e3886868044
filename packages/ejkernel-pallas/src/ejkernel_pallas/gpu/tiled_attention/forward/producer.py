"""The warpgroup of the forward kernel that takes tiles of queries, and fetches for those that multiply."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import ROWS
from ejkernel_pallas.gpu.tiled_attention.forward.call import Call, next_tile
from ejkernel_pallas.gpu.tiled_attention.masks.padding import clean_rows

I32 = jnp.int32


def fetch_tile(call: Call, carry: Any) -> Any:
    """Fetches what the products of one query tile need, keys one tile ahead of values."""
    turn, step, number, (start, _, _, stop) = carry
    item = tile_scheduler.item(call.plan, number)
    _take(call, turn)
    fetch, key_block = functools.partial(_fetch_visited, call, item), functools.partial(call.key_block, item)
    fetch("k", key_block(start), step)
    for warpgroup in range(call.tile.warpgroups):
        _fetch_queries(call, item, turn, warpgroup)
    after = next_tile(call, turn)

    def pair(index: Any, count: Any) -> Any:
        fetch("k", key_block(index + 1), count + 1)
        _fetch_values(call, item, key_block(index), count)
        return count + 1

    count = lax.fori_loop(start, stop - 1, pair, step)
    _fetch_values(call, item, key_block(stop - 1), count)
    return turn + 1, count + 1, *after


def _fetch_visited(call: Call, item: tile_scheduler.Item, what: str, index: Any, count: Any, there: Any = None) -> None:
    """Fetches a tile of keys or of values as soon as its stage is free."""
    shared, slot = call.shared, call.slot(count)
    buffer, full, free = (getattr(shared, f"{what}{part}") for part in ("", "_full", "_free"))
    pl.when(count >= call.tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    rows, head = pl.ds(index * call.tile.keys, call.tile.keys), lax.div(item.head, I32(call.spec.group))
    there = full.at[slot] if there is None else there
    source = call.operands[what]
    plgpu.copy_gmem_to_smem(source.at[item.row(source), rows, head], buffer.at[slot], there)
    if what == "k" and call.spec.drops:
        numbers = call.operands["k_numbers"]
        plgpu.copy_gmem_to_smem(numbers.at[item.row(numbers), rows], call.numbers(count), there)


def _fetch_values(call: Call, item: tile_scheduler.Item, index: Any, count: Any) -> None:
    """Fetches a tile of values; those of padding become zeros, as a weight of zero times NaN is NaN."""
    fetch = functools.partial(_fetch_visited, call, item, "v", index, count)
    if not call.spec.segments:
        return fetch()
    shared, slot = call.shared, call.slot(count)
    padded, ids = call.operands["padded"], call.operands["k_ids"]
    padded = padded[item.row(padded), index] > 0
    pl.when(~padded)(fetch)

    @pl.when(padded)
    def _clean() -> None:
        fetch(shared.v_raw)
        plgpu.barrier_wait(shared.v_raw)
        rows = pl.ds(index * call.tile.keys, call.tile.keys)
        clean_rows(shared.v.at[slot], ids.at[item.row(ids), rows])
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.v_full.at[slot])


def _fetch_queries(call: Call, item: tile_scheduler.Item, turn: Any, warpgroup: int) -> None:
    """Fetches the queries of a warpgroup as soon as their buffer is free."""
    shared, buffer = call.shared, call.buffer(turn, warpgroup)
    pl.when(turn >= call.tile.buffers)(lambda: plgpu.barrier_wait(shared.q_free.at[buffer]))
    rows, full = pl.ds(item.tile * call.tile.queries + warpgroup * ROWS, ROWS), shared.q_full.at[buffer]
    source = call.operands["q"]
    plgpu.copy_gmem_to_smem(source.at[item.row(source), rows, item.head], shared.q.at[buffer], full)
    if call.spec.drops:
        numbers = call.operands["q_numbers"]
        plgpu.copy_gmem_to_smem(numbers.at[item.row(numbers), item.head, rows], shared.q_numbers.at[buffer], full)
    if call.spec.segments:
        ranges = call.operands["ranges"]
        plgpu.copy_gmem_to_smem(ranges.at[item.row(ranges), :, rows], shared.ranges.at[buffer], full)


def _take(call: Call, turn: Any) -> None:
    """Takes the tile for the turn after this one."""
    shared, place = call.shared, lax.rem(turn, I32(2))
    pl.when(turn > 1)(lambda: plgpu.barrier_wait(shared.number_free.at[place]))
    tile_scheduler.take(call.plan, call.taken, shared.number.at[place])
    plgpu.barrier_arrive(shared.number_full.at[place])
