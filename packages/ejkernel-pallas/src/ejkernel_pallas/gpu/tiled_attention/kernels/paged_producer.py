"""The producer warpgroup of the forward kernel for keys and values in pages: one bulk copy per page.

    per work tile   K(0) | Q | K(1) | V(0) | K(2) | V(1) | ... | K(n-1) | V(n-2) | V(n-1)
    page table      0, 1     | 2           | 3           | ...      one block ahead of its keys, two ahead of its values

Entries of the page table come from L2: they are loaded one block ahead, so that their latency overlaps with waits for
stages, and are kept for the values of their block.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows_outside
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call, PagedTile, wait_for_next_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_producer import fetch_next_tile_index

MAX_PREFETCHED_PAGES = 4
"""The largest number of copies per block whose pages are kept in registers: more would not fit with the next
block's.
"""


def produce(call: Call, carry: Any) -> Any:
    """Copies the operands of one work tile, keys one block ahead of values."""
    assert call.paged_key_access is not None
    nth_tile, step, number, (start, _, _, stop) = carry
    item = tile_scheduler.locate_work_tile(call.schedule, number)
    # Read once per tile: in the loop, its copies would wait for another load.
    tile = call.paged_key_access.load_tile(call.operands, item.tile_in_head)
    find_pages = functools.partial(call.paged_key_access.find_pages, call.operands, tile)
    keys, values = (functools.partial(copy, call, item, tile) for copy in (_copy_keys, _copy_values))
    # A whole tile ahead, so that the latency of the atomic overlaps with the copies.
    fetch_next_tile_index(call, nth_tile)
    first, last = find_pages(start), stop - 1
    keys(first, start, step)
    for warpgroup in range(call.tile.consumer_warpgroups):
        _copy_queries(call, item, tile, nth_tile, warpgroup)
    next_item = wait_for_next_tile(call, nth_tile)

    def copy_key_and_value_blocks(index: Any, carry: Any) -> Any:
        count, *prefetched_addresses = carry
        next_addresses = [find_pages(jnp.minimum(index + 2, last))] if prefetched_addresses else []
        keys(prefetched_addresses[1] if prefetched_addresses else find_pages(index + 1), index + 1, count + 1)
        values(prefetched_addresses[0] if prefetched_addresses else find_pages(index), index, count)
        return count + 1, *prefetched_addresses[1:], *next_addresses

    prefetched_addresses = (
        [first, find_pages(jnp.minimum(start + 1, last))]
        if call.paged_key_access.copies_per_block <= MAX_PREFETCHED_PAGES
        else []
    )
    count, *prefetched_addresses = lax.fori_loop(start, last, copy_key_and_value_blocks, (step, *prefetched_addresses))
    values(prefetched_addresses[0] if prefetched_addresses else find_pages(last), last, count)
    return nth_tile + 1, count + 1, *next_item


def _copy_keys(
    call: Call, item: tile_scheduler.WorkTile, tile: PagedTile, pages: tuple[Any, ...], block: Any, key_blocks_done: Any
) -> None:
    """Copies a block of keys once its stage is free; the first `kv_stages` are free from the start."""
    assert call.paged_key_access is not None
    shared, slot = call.shared, call.stage_of_key_block(key_blocks_done)
    full = shared.k_full.at[slot]
    pl.when(key_blocks_done >= call.tile.kv_stages)(lambda: plgpu.barrier_wait(shared.k_free.at[slot]))
    # After the wait: until then the previous block is masked with its word.
    shared.valid_key_words[slot] = call.paged_key_access.valid_key_word(pages)
    call.paged_key_access.copy_block(call.operands, "k", pages, block, _kv_head(call, item), shared.k.at[slot], full)
    plgpu.barrier_arrive(full)  # after the word


def _copy_values(
    call: Call, item: tile_scheduler.WorkTile, tile: PagedTile, pages: tuple[Any, ...], block: Any, key_blocks_done: Any
) -> None:
    """Copies a block of values, and zeroes slots that belong to no key of the tile and may hold NaN."""
    assert call.paged_key_access is not None
    key_pages, shared, slot = call.paged_key_access, call.shared, call.stage_of_key_block(key_blocks_done)
    pl.when(key_blocks_done >= call.tile.kv_stages)(lambda: plgpu.barrier_wait(shared.v_free.at[slot]))

    def copy_pages(full_barrier: Any) -> None:
        key_pages.copy_block(call.operands, "v", pages, block, _kv_head(call, item), shared.v.at[slot], full_barrier)

    full, key = shared.v_full.at[slot], block * call.tile.block_kv
    first, end = tile.first_key - key, tile.key_end - key
    inside = (first <= 0) & (end >= call.tile.block_kv)
    pl.when(inside)(lambda: copy_pages(full))

    @pl.when(~inside)
    def _zero_padding_values() -> None:
        copy_pages(shared.v_copied)
        plgpu.barrier_wait(shared.v_copied)
        zero_rows_outside(shared.v.at[slot], first, end)
        plgpu.commit_smem()
        # The same number of arrivals as with copies.
        for _ in range(key_pages.copies_per_block):
            plgpu.barrier_arrive(full)


def _copy_queries(call: Call, item: tile_scheduler.WorkTile, tile: PagedTile, nth_tile: Any, warpgroup: int) -> None:
    """Copies the queries of a warpgroup once their buffer is free."""
    shared, buffer = call.shared, call.query_buffer_index(nth_tile, warpgroup)
    pl.when(nth_tile >= call.tile.query_buffers)(lambda: plgpu.barrier_wait(shared.q_free.at[buffer]))
    source, rows = call.operands["q"], pl.ds(tile.first_row + warpgroup * WGMMA_M, WGMMA_M)
    plgpu.copy_gmem_to_smem(source.at[item.batch_row, rows, item.head], shared.q.at[buffer], shared.q_full.at[buffer])


def _kv_head(call: Call, item: tile_scheduler.WorkTile) -> Any:
    return lax.div(item.head, I32(call.spec.group_size))
