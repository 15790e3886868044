"""The producer warpgroup of the latent kernel, which copies queries and blocks of keys to shared memory."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import Call, WorkItem, for_each_item
from ejkernel_pallas.gpu.latent_attention.kernels.page_copies import PageAndSlotPerCopy, find_page_and_slot_per_copy
from ejkernel_pallas.gpu.latent_attention.spec import (
    BLOCK_KV,
    CHUNK_COLUMNS,
    CHUNKS_PER_HALF,
    KEYS_PER_STEP,
    PIECES_PER_HALF,
    ROTARY_DIM,
)


def produce(call: Call, program_and_tile: tuple[Any, Any]) -> None:
    """Copies all operands of the program, by one warp; `program_and_tile` is the block's program and tile."""

    def copy_item(item: WorkItem, carry: Any) -> Any:
        count, number = carry
        _copy_queries(call, item, number, program_and_tile[1])
        count = lax.fori_loop(
            0, item.num_steps, lambda step, count: _copy_step(call, item, item.first_step + step, count), count
        )
        return count, number + 1

    for_each_item(call, copy_item, (I32(0), I32(0)), program_and_tile)


def _copy_queries(call: Call, item: WorkItem, item_index: Any, head_tile: Any) -> None:
    shared, query = call.shared, call.operands["query"]
    # The first item finds the queries' memory free.
    pl.when(item_index > 0)(lambda: plgpu.barrier_wait(shared.q_free))
    rows = pl.ds(head_tile * WGMMA_M, WGMMA_M)
    for chunk in range(2 * CHUNKS_PER_HALF + 1):
        source = query.at[item.query_row, rows, pl.ds(chunk * CHUNK_COLUMNS, CHUNK_COLUMNS)]
        plgpu.copy_gmem_to_smem(source, shared.query_chunks.at[chunk], shared.q_full)


def _copy_step(call: Call, item: WorkItem, step: Any, steps_done: Any) -> Any:
    """Copies two blocks in halves, each once its memory is free."""
    # Block 0 first: its values are multiplied first, so its buffers are free first. There is memory for one step only:
    # the copy of a half overlaps with products of the other halves.
    for block in (0, 1):
        # Before the waits, so that the page table's latency overlaps with them.
        page_slots, present = find_page_and_slot_per_copy(call, item, step * KEYS_PER_STEP + block * BLOCK_KV, BLOCK_KV)
        _copy_half_read_by_one_warpgroup(call, page_slots, steps_done, block)
        _copy_half_read_by_both_warpgroups(call, page_slots, present, steps_done, block)
    return steps_done + 1


def _copy_half_read_by_one_warpgroup(call: Call, page_slots: PageAndSlotPerCopy, steps_done: Any, block: int) -> None:
    """Copies the half of a block that only the warpgroup that scores it reads as values, which is free first."""
    shared = call.shared
    # The first step of the program finds all buffers free, without an arrival.
    pl.when(steps_done > 0)(lambda: plgpu.barrier_wait(shared.half_read_by_one_warpgroup_free.at[block]))
    target = (shared.key_left_half_chunks, shared.key_right_half_chunks)[block].at[block]
    _copy_half(call, page_slots, block, target, shared.half_read_by_one_warpgroup_full, block)


def _copy_half_read_by_both_warpgroups(
    call: Call, page_slots: PageAndSlotPerCopy, valid_key_bits: Any, steps_done: Any, block: int
) -> None:
    """Copies the half that both warpgroups read, and the rotary columns."""
    shared = call.shared
    pl.when(steps_done > 0)(lambda: plgpu.barrier_wait(shared.half_read_by_both_warpgroups_free.at[block]))
    target = (shared.key_right_half_chunks, shared.key_left_half_chunks)[block].at[block]
    _copy_half(call, page_slots, 1 - block, target, shared.half_read_by_both_warpgroups_full, block)
    full = shared.rotary_full.at[block]
    # After the wait: until then the previous block is masked with its bits.
    shared.valid_key_bits[block] = valid_key_bits
    _copy_key_columns(
        call, page_slots, "rotary", pl.ds(call.spec.rotary_start, ROTARY_DIM), shared.rotary_columns.at[block], full
    )
    plgpu.barrier_arrive(full)  # after the bits


def _copy_half(
    call: Call, page_slots: PageAndSlotPerCopy, half_index: int, target: Any, full_barriers: Any, block: int
) -> None:
    """Copies the chunks of a half of a block, in the order in which the product with the queries reads them."""
    for chunk in range(CHUNKS_PER_HALF):
        columns = pl.ds((half_index * CHUNKS_PER_HALF + chunk) * CHUNK_COLUMNS, CHUNK_COLUMNS)
        piece = block * PIECES_PER_HALF + chunk * PIECES_PER_HALF // CHUNKS_PER_HALF
        _copy_key_columns(call, page_slots, "latent", columns, target.at[chunk], full_barriers.at[piece])


def _copy_key_columns(
    call: Call, page_slots: PageAndSlotPerCopy, operand_name: str, columns: Any, target: Any, full_barrier: Any
) -> None:
    rows = call.spec.slots_per_copy
    for number, (page, slot) in enumerate(page_slots):
        # One copy per page, or per part of one: at least eight rows, since the swizzle repeats after eight.
        source = call.operands[operand_name].at[page, pl.ds(slot, rows), columns]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(number * rows, rows)], full_barrier)
