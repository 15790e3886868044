"""The producer warpgroup of the paged kernel, which copies queries, and keys and values page by page, to shared
memory.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention.pages import COMBINED
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import Item, for_each_item, program_of
from ejkernel_pallas.gpu.latent_attention.kernels.page_copies import PageSlots, find_page_slots
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP
from ejkernel_pallas.gpu.paged_attention.kernels.call import Call
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec


def produce(call: Call) -> None:
    """Copies all operands of the program."""

    def one(item: Item, carry: Any) -> Any:
        count, number = carry
        _copy_queries(call, item, number)

        def step(n: Any, count: Any) -> Any:
            _copy_block(call, item, (item.first + n) * KEYS_PER_STEP, count)
            return count + 1

        return lax.fori_loop(0, item.steps, step, count), number + 1

    for_each_item(call, one, (I32(0), I32(0)))


def _copy_queries(call: Call, item: Item, number: Any) -> None:
    """Copies 64 rows of the tile's KV head from its first token on: rows of later tokens are computed and dropped."""
    spec, shared = call.spec, call.shared
    _, head = program_of(call)
    # The first item finds the queries' memory free.
    pl.when(number > 0)(lambda: plgpu.barrier_wait(shared.q_free))
    row = head * spec.query_rows + call.operands["items"][item.row, 6] * spec.group
    plgpu.copy_gmem_to_smem(call.operands["query"].at[pl.ds(row, WGMMA_M), :], shared.q, shared.q_full)


def _copy_block(call: Call, item: Item, key: Any, count: Any) -> None:
    """Copies the keys, then the values of a block, each once its stage is free."""
    spec, shared = call.spec, call.shared
    slot = lax.rem(count, I32(spec.stages))
    # Before the waits, so that the page table's latency overlaps with them.
    page_slots, present = find_page_slots(call, item, key, KEYS_PER_STEP)
    # The first blocks find their stages free, without an arrival.
    pl.when(count >= spec.stages)(lambda: plgpu.barrier_wait(shared.k_free.at[slot]))
    # After the wait: until then the previous block is masked with its bits.
    shared.present[slot] = present
    _copy(call, page_slots, 0, shared.k.at[slot], shared.k_full.at[slot])
    plgpu.barrier_arrive(shared.k_full.at[slot])  # after the bits
    pl.when(count >= spec.stages)(lambda: plgpu.barrier_wait(shared.v_free.at[slot]))
    _copy(call, page_slots, 1, shared.v.at[slot], shared.v_full.at[slot])


def _copy(call: Call, page_slots: PageSlots, key_or_value: int, target: Any, full: Any) -> None:
    """Copies keys (0) or values (1) of a block, one copy per page or part of one; past an array's end copies write
    zeros.
    """
    rows, source = call.spec.slots_per_copy, call.operands[("keys", "values")[key_or_value]]
    _, head = program_of(call)
    for number, (page, slot) in enumerate(page_slots):
        index, column = cache_index(call.spec, page, head, key_or_value)
        columns = pl.ds(column, target.shape[1])
        plgpu.copy_gmem_to_smem(
            source.at[index, pl.ds(slot, rows), columns], target.at[pl.ds(number * rows, rows)], full
        )


def cache_index(spec: PagedSpec, page: Any, head: Any, key_or_value: int) -> tuple[Any, Any]:
    """Returns the indices of a head's keys (0) or values (1) of a page in the cache of three axes: first index, first
    column.

    The second axis is the page's slots.
    """
    size = (spec.key_dim, spec.value_dim)[key_or_value]
    if spec.layout == COMBINED:
        return page, (head * 2 + key_or_value) * spec.lanes
    if spec.layout == "pshd":
        return page, head * size
    if spec.layout == "phsd":
        return page * spec.tiles + head, 0
    # Heads are outermost: a missing page is past the pages of all heads, not at the next head's first page.
    return jnp.where(page < spec.pages, head * spec.pages + page, spec.tiles * spec.pages), 0
