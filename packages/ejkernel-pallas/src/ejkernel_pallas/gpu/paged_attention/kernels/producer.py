"""The producer warpgroup of the paged kernel, which copies queries, and keys and values page by page, to shared
memory.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention.pages import COMBINED_LAYOUT
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import WorkItem, for_each_item, program_and_head_tile
from ejkernel_pallas.gpu.latent_attention.kernels.page_copies import PageAndSlotPerCopy, find_page_and_slot_per_copy
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.kernels.call import Call
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec


def produce(call: Call) -> None:
    """Copies all operands of the program."""

    def copy_item(item: WorkItem, carry: Any) -> Any:
        blocks_done, item_index = carry
        first_step, num_steps = item.first_step, item.num_steps
        if call.spec.split_keys:
            first_step, end = split_steps(call.spec, item, item.first_step, item.num_steps)
            num_steps = end - first_step
        else:
            _copy_queries(call, item, item_index)

        def step(n: Any, blocks_done: Any) -> Any:
            _copy_block(call, item, (first_step + n) * KEYS_PER_STEP, blocks_done)
            if call.spec.split_keys:
                # After the blocks for which there are stages while the previous item's last step reads its queries.
                before = jnp.minimum(max(0, call.spec.stages - 2), num_steps - 1)
                pl.when(n == before)(lambda: _copy_queries(call, item, item_index))
            return blocks_done + 1

        return lax.fori_loop(0, num_steps, step, blocks_done), item_index + 1

    for_each_item(call, copy_item, (I32(0), I32(0)), keys_per_step=call.spec.keys_per_unit)


def split_steps(spec: PagedSpec, item: WorkItem, first_unit: Any, num_units: Any) -> tuple[Any, Any]:
    """Returns the first step of units of splits of an item, and the step after their last one, counted from key 0.

    An item without keys has one step.
    """
    first = jnp.maximum(first_unit * spec.steps_per_unit, lax.div(item.first_key, I32(KEYS_PER_STEP)))
    key_steps = lax.div(item.key_end + (KEYS_PER_STEP - 1), I32(KEYS_PER_STEP))
    end = jnp.minimum((first_unit + num_units) * spec.steps_per_unit, key_steps)
    return first, jnp.maximum(end, first + 1)


def item_rows(spec: PagedSpec, token: Any, head: Any) -> tuple[Any, Any]:
    """Returns the row of the queries in place with which a token's tile begins, a multiple of eight, and the first row
    of the tile that has a query head of this KV head.
    """
    row = (token * spec.tiles_per_item + head) * spec.heads_per_tile
    offset = lax.rem(row, I32(SWIZZLE_ATOM_ROWS))
    return pl.multiple_of(row - offset, SWIZZLE_ATOM_ROWS), offset


def _copy_queries(call: Call, item: WorkItem, item_index: Any) -> None:
    """Copies 64 rows of the tile's KV head from its first token on: rows of later tokens are computed and dropped."""
    spec, shared = call.spec, call.shared
    _, head = program_and_head_tile(call)
    # The first item finds the queries' memory free.
    pl.when(item_index > 0)(lambda: plgpu.barrier_wait(shared.q_free))
    row = call.operands["items"][item.query_row, 6]
    if spec.queries_in_place:
        rows = spec.rows_per_token
        first, _ = item_rows(spec, row, head)
        plgpu.copy_gmem_to_smem(
            call.operands["query"].at[pl.ds(first, rows), :], shared.q.at[pl.ds(0, rows)], shared.q_full
        )
        return
    row = head * spec.query_rows_per_kv_head + row * spec.rows_per_token
    plgpu.copy_gmem_to_smem(call.operands["query"].at[pl.ds(row, WGMMA_M), :], shared.q, shared.q_full)


def _copy_block(call: Call, item: WorkItem, first_key: Any, blocks_done: Any) -> None:
    """Copies the keys, then the values of a block, each once its stage is free."""
    spec, shared = call.spec, call.shared
    slot = lax.rem(blocks_done, I32(spec.stages))
    # Before the waits, so that the page table's latency overlaps with them.
    page_slots, present = find_page_and_slot_per_copy(call, item, first_key, KEYS_PER_STEP)
    # The first blocks find their stages free, without an arrival.
    pl.when(blocks_done >= spec.stages)(lambda: plgpu.barrier_wait(shared.k_free.at[slot]))
    # After the wait: until then the previous block is masked with its bits.
    shared.valid_key_bits[slot] = present
    _copy_keys_or_values(call, page_slots, 0, shared.k.at[slot], shared.k_full.at[slot])
    plgpu.barrier_arrive(shared.k_full.at[slot])  # after the bits
    pl.when(blocks_done >= spec.stages)(lambda: plgpu.barrier_wait(shared.v_free.at[slot]))
    _copy_keys_or_values(call, page_slots, 1, shared.v.at[slot], shared.v_full.at[slot])


def _copy_keys_or_values(
    call: Call, page_slots: PageAndSlotPerCopy, key_or_value_index: int, target: Any, full_barrier: Any
) -> None:
    """Copies keys (0) or values (1) of a block, one copy per page or part of one; past an array's end copies write
    zeros.
    """
    rows, source = call.spec.slots_per_copy, call.operands[("keys", "values")[key_or_value_index]]
    _, head = program_and_head_tile(call)
    for number, (page, slot) in enumerate(page_slots):
        index, column = cache_index_and_column(call.spec, page, head, key_or_value_index)
        columns = pl.ds(column, target.shape[1])
        plgpu.copy_gmem_to_smem(
            source.at[index, pl.ds(slot, rows), columns], target.at[pl.ds(number * rows, rows)], full_barrier
        )


def cache_index_and_column(spec: PagedSpec, page: Any, head: Any, key_or_value_index: int) -> tuple[Any, Any]:
    """Returns the indices of a head's keys (0) or values (1) of a page in the cache of three axes: first index, first
    column.

    The second axis is the page's slots.
    """
    size = (spec.key_dim, spec.value_dim)[key_or_value_index]
    if spec.cache_layout == COMBINED_LAYOUT:
        return page, (head * 2 + key_or_value_index) * spec.keys_to_values_stride
    if spec.cache_layout == "pshd":
        return page, head * size
    if spec.cache_layout == "phsd":
        return page * spec.tiles_per_item + head, 0
    # Heads are outermost: a missing page is past the pages of all heads, not at the next head's first page.
    return jnp.where(page < spec.num_pages, head * spec.num_pages + page, spec.tiles_per_item * spec.num_pages), 0
