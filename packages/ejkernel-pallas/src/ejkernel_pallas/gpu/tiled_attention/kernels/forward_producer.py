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
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call, wait_for_next_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.padding import zero_padding_rows


def produce(call: Call, carry: Any) -> Any:
    """Copies the operands of one work tile, keys one block ahead of values."""
    nth_tile, step, number, (start, _, _, stop) = carry
    item = tile_scheduler.locate_work_tile(call.schedule, number)
    # A whole tile ahead, so that the latency of the atomic overlaps with the copies.
    fetch_next_tile_index(call, nth_tile)
    copy_block, key_block = (
        functools.partial(_copy_key_or_value_block, call, item),
        functools.partial(call.key_block_index, item),
    )
    copy_block("k", key_block(start), step)
    for warpgroup in range(call.tile.consumer_warpgroups):
        _copy_queries(call, item, nth_tile, warpgroup)
    next_item = wait_for_next_tile(call, nth_tile)

    def copy_key_and_value_blocks(index: Any, key_blocks_done: Any) -> Any:
        copy_block("k", key_block(index + 1), key_blocks_done + 1)
        _copy_values(call, item, key_block(index), key_blocks_done)
        return key_blocks_done + 1

    count = lax.fori_loop(start, stop - 1, copy_key_and_value_blocks, step)
    _copy_values(call, item, key_block(stop - 1), count)
    return nth_tile + 1, count + 1, *next_item


def _copy_key_or_value_block(
    call: Call,
    item: tile_scheduler.WorkTile,
    operand_name: str,
    list_index: Any,
    key_blocks_done: Any,
    full_barrier: Any = None,
) -> None:
    """Copies a block of keys or of values once its stage is free; the first `kv_stages` are free from the start."""
    shared, slot = call.shared, call.stage_of_key_block(key_blocks_done)
    buffer, full, free = (getattr(shared, f"{operand_name}{part}") for part in ("", "_full", "_free"))
    pl.when(key_blocks_done >= call.tile.kv_stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    full_barrier = full.at[slot] if full_barrier is None else full_barrier
    rows, head = (
        pl.ds(call.first_key(list_index), call.tile.block_kv),
        lax.div(item.head, I32(call.spec.group_size)),
    )
    source = call.operands[operand_name]
    target = _chunks_by_row(call, operand_name, slot) if call.spec.lists_first_keys else buffer.at[slot]
    plgpu.copy_gmem_to_smem(source.at[item.batch_row_of(source), rows, head], target, full_barrier)
    if operand_name == "k" and call.spec.has_dropout:
        numbers = call.operands["k_dropout_keys"]
        plgpu.copy_gmem_to_smem(
            numbers.at[item.batch_row_of(numbers), rows], call.key_block_dropout_keys(key_blocks_done), full_barrier
        )


def _chunks_by_row(call: Call, operand_name: str, slot: Any) -> Any:
    """Returns a tile in chunks of 64 columns, [rows, chunks, 64] as in device memory. Copies may begin with any row."""
    return getattr(call.shared, f"{operand_name}_rows").at[slot].transpose((1, 0, 2))


def _copy_values(call: Call, item: tile_scheduler.WorkTile, list_index: Any, key_blocks_done: Any) -> None:
    """Copies a block of values, and zeroes those of padding: a weight of zero times NaN is NaN."""
    copy_block = functools.partial(_copy_key_or_value_block, call, item, "v", list_index, key_blocks_done)
    if not call.spec.has_segments:
        return copy_block()
    shared, slot = call.shared, call.stage_of_key_block(key_blocks_done)
    padded, ids = call.operands["padded"], call.operands["k_ids"]
    padded = padded[item.batch_row_of(padded), list_index] > 0
    pl.when(~padded)(copy_block)

    @pl.when(padded)
    def _zero_padding_values() -> None:
        # Uses a separate mbarrier: consumers must not see the stage before its padding is overwritten.
        copy_block(shared.v_copied)
        plgpu.barrier_wait(shared.v_copied)
        rows = pl.ds(call.first_key(list_index), call.tile.block_kv)
        values = shared.v.at[slot]
        chunks = [values.at[n] for n in range(values.shape[0])] if call.spec.lists_first_keys else [values]
        for chunk in chunks:
            zero_padding_rows(chunk, ids.at[item.batch_row_of(ids), rows])
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.v_full.at[slot])


def _copy_queries(call: Call, item: tile_scheduler.WorkTile, nth_tile: Any, warpgroup: int) -> None:
    """Copies the queries of a warpgroup once their buffer is free."""
    shared, buffer = call.shared, call.query_buffer_index(nth_tile, warpgroup)
    pl.when(nth_tile >= call.tile.query_buffers)(lambda: plgpu.barrier_wait(shared.q_free.at[buffer]))
    rows, full = pl.ds(item.tile_in_head * call.tile.block_q + warpgroup * WGMMA_M, WGMMA_M), shared.q_full.at[buffer]
    source = call.operands["q"]
    target = _chunks_by_row(call, "q", buffer) if call.spec.lists_first_keys else shared.q.at[buffer]
    plgpu.copy_gmem_to_smem(source.at[item.batch_row_of(source), rows, item.head], target, full)
    if call.spec.has_dropout:
        numbers = call.operands["q_dropout_keys"]
        plgpu.copy_gmem_to_smem(
            numbers.at[item.batch_row_of(numbers), item.head, rows], shared.q_dropout_keys.at[buffer], full
        )
    if call.spec.has_key_ranges:
        ranges = call.operands["ranges"]
        plgpu.copy_gmem_to_smem(ranges.at[item.batch_row_of(ranges), :, rows], shared.key_ranges.at[buffer], full)


def fetch_next_tile_index(call: Call, nth_tile: Any) -> None:
    """Fetches the index of the next work tile."""
    shared, place = call.shared, lax.rem(nth_tile, I32(2))
    # Two slots, since warpgroups may still read the last index; both are free from the start.
    pl.when(nth_tile > 1)(lambda: plgpu.barrier_wait(shared.tile_index_free.at[place]))
    tile_scheduler.fetch_and_store_tile_index(call.schedule, call.tile_counter, shared.tile_indices.at[place])
    plgpu.barrier_arrive(shared.tile_index_full.at[place])
