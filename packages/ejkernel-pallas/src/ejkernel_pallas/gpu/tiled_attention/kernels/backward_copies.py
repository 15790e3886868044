"""The producer warp of the backward kernel, which copies to shared memory, and the adder warps, which add dq to HBM.

    producer warp    Q, dO, lse, delta of query block t + depth ─► stage free ─► TMA ─► full barrier
    adder warps      dq(t-1) full ─► wait until `before` blocks have added ─► bulk reduce-add ─► dq free, semaphore + 1

The semaphore of a query block makes its key tiles add in order, so that results are reproducible bit for bit.
"""

import functools
from typing import Any, Literal

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.hopper import clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32, SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import (
    Call,
    adder_warp_of_piece,
    dq_full_barrier,
)


def copy_operands_to_shared(call: Call, item: tile_scheduler.WorkTile, for_each_block: Any) -> None:
    """Copies the block's keys and values, and then query blocks once their stages are free."""
    buffers, tile, keys, values = call.buffers, call.tile, call.operands["k"], call.operands["v"]
    for w in range(tile.key_tiles_per_block):
        rows = pl.ds(
            item.tile_in_head * tile.block_kv + (call.cluster_member * tile.key_tiles_per_block + w) * WGMMA_M, WGMMA_M
        )
        for part in range(tile.key_chunks_per_row):
            source = keys.at[
                item.batch_row_of(keys), rows, item.head, pl.ds(part * tile.key_chunk_columns, tile.key_chunk_columns)
            ]
            plgpu.copy_gmem_to_smem(source, buffers["k"].at[part * tile.key_tiles_per_block + w], buffers["kv_full"])
        source = values.at[item.batch_row_of(values), rows, item.head]
        plgpu.copy_gmem_to_smem(source, buffers["v"].at[w], buffers["kv_full"])
        for extra in tile.row_array_names(call.spec, "k"):
            source = call.operands[extra]
            plgpu.copy_gmem_to_smem(
                source.at[item.batch_row_of(source), rows], buffers[extra].at[w], buffers["kv_full"]
            )
    # A member of a cluster computes one half of dq's columns, for the keys of both: it needs those columns of the other
    # member's keys.
    for part in range(tile.num_peer_key_chunks):
        rows = pl.ds(item.tile_in_head * tile.block_kv + (1 - call.cluster_member) * WGMMA_M, WGMMA_M)
        columns = pl.ds((call.cluster_member * tile.num_peer_key_chunks + part) * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS)
        source = keys.at[item.batch_row_of(keys), rows, item.head, columns]
        plgpu.copy_gmem_to_smem(source, buffers["k"].at[tile.key_chunks_per_row + part], buffers["kv_full"])
    for_each_block(functools.partial(_copy_query_block, call, item), I32(0), False)


def _copy_query_block(
    call: Call, item: tile_scheduler.WorkTile, _: bool, head: Any, list_index: Any, steps_done: Any
) -> Any:
    index = call.query_block_index(item, head, list_index)
    # The two blocks of a cluster loop over the same query blocks: each copies one half for both, by multicast.
    copy = functools.partial(
        plgpu.copy_gmem_to_smem, collective_axes=clusters.CLUSTER_AXIS if call.tile.has_wide_heads else None
    )
    for name, stages in call.tile.stages_by_operand.items():
        slot = lax.rem(steps_done, I32(stages))
        full, free = call.buffers[f"{name}_full"].at[slot], call.buffers[f"{name}_free"].at[slot]
        # The first copies find their stages free.
        pl.when(steps_done >= stages)(functools.partial(plgpu.barrier_wait, free))
        rows = pl.ds(index * call.tile.block_q, call.tile.block_q)
        source = call.operands[name]
        copy(source.at[item.batch_row_of(source), rows, head], call.buffers[name].at[slot], full)
        for extra in call.tile.row_array_names(call.spec, name):
            source = call.operands[extra]
            row = item.batch_row_of(source)
            source = source.at[row, rows] if extra.endswith("ids") else source.at[row, head, rows]
            copy(source, call.buffers[extra].at[slot], full)
    return steps_done + 1


def add_dq_pieces(call: Call, item: tile_scheduler.WorkTile, for_each_block: Any, adder_warp_index: Any) -> None:
    """Adds the pieces of dq that belong to warp `adder_warp_index` to device memory, after the earlier key tiles."""
    buffers, tile, first = call.buffers, call.tile, call.operands["first"]
    tiles = first.shape[-1]

    def add_step_pieces(_: bool, head: Any, list_index: Any, steps_done: Any) -> Any:
        for piece in range(tile.num_dq_pieces):
            is_for_this_warp = adder_warp_of_piece(call, steps_done, piece) == adder_warp_index
            pl.when(is_for_this_warp)(
                functools.partial(add_piece, piece, head, list_index, dq_full_barrier(call, steps_done, piece))
            )
        return steps_done + 1

    def copy_strip(reduction: Literal["add"] | None, piece: int, strip_index: int, head: Any, index: Any) -> None:
        for piece_warpgroup in range(piece * tile.warpgroups_per_dq_piece, (piece + 1) * tile.warpgroups_per_dq_piece):
            row, column = tile.dq_strip_start(call.cluster_member, piece_warpgroup, strip_index)
            rows, columns = pl.ds(index * tile.block_q + row, WGMMA_M), pl.ds(column, tile.dq_strip_columns)
            target = call.outputs[2].at[item.batch_row, rows, head, columns]
            plgpu.copy_smem_to_gmem(buffers["dq"].at[piece_warpgroup], target, reduction_op=reduction)

    def add_piece(piece: int, head: Any, list_index: Any, full_barrier: Any) -> None:
        index = call.query_block_index(item, head, list_index)
        # The number of blocks that add to these queries before this one.
        if call.spec.has_block_lists:
            before = call.list_entry("ranks", item, head, list_index)
        else:
            before = item.tile_in_head - first[item.batch_row_of(first), index]
        place = (item.batch_row * call.spec.num_heads + head) * tiles + index
        add_count = call.dq_add_counts.at[
            (place * tile.blocks_per_cluster + call.cluster_member) * tile.num_dq_pieces + piece
        ]
        # A counter that only increases: the tile with `before` predecessors waits for that value, adds, and increments
        # it.
        plgpu.semaphore_wait(add_count, before, decrement=False, memory_scope="gpu")
        for strip in range(tile.strips_per_dq_piece):
            plgpu.barrier_wait(full_barrier)
            # The first one stores, so that dq need not be zeroed.
            pl.when(before == 0)(functools.partial(copy_strip, None, piece, strip, head, index))
            pl.when(before > 0)(functools.partial(copy_strip, "add", piece, strip, head, index))
            # Shared memory has been read, so the next strip may be written; the addition may still be in flight.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(buffers["dq_free"].at[piece])
        plgpu.wait_smem_to_gmem(0)
        # The additions have reached device memory before the next key tile is signalled.
        plgpu.semaphore_signal(add_count, 1, memory_scope="gpu")

    for_each_block(add_step_pieces, I32(0), False)
