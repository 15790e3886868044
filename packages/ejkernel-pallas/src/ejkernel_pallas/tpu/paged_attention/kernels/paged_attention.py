"""Paged attention kernel: a loop over work items, each with a loop over its key blocks (Kwon et al. 2023).

    computed              copies in flight (DMA)                                  buffers in VMEM
    -----------------     ------------------------------------------------------  ------------------------------
    item i, block n       pages of blocks n+1 and n+2, of this item or the next   keys_buffer[PREFETCH + 1 slots]
                          their columns of the bias for pairs, if they have some  pair_bias_buffer, as many
                          values that functions read by key                       function_keys_buffer, as many
                          queries of item i+1                                     query_buffer[2]
                          output and lse of item i-1                              output_buffer[2], lse_buffer[2]
                          new tokens of item i+2, into their pages                none: from HBM to HBM

The kernel is persistent: it has one grid step per core, and its pipeline does not drain between items or sequences. It
reads page numbers from the table in scalar memory; pages that no row attends are not copied.

Hazard: new tokens must be in their pages before a copy of those pages starts. The prefetch distance is PREFETCH blocks,
so the first block that may copy pages of item i+2 is the last one of item i: the kernel waits for the tokens there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.paged_attention.kernels import copies, pair_bias, pair_functions
from ejkernel_pallas.tpu.paged_attention.kernels.attend_block import attend_block, call_with_row_count
from ejkernel_pallas.tpu.paged_attention.kernels.copies import KeyBlock, PrefetchCursor, WorkItem
from ejkernel_pallas.tpu.paged_attention.kernels.online_softmax import ProductRows, init_softmax, write_results
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PREFETCHED_BLOCKS, PagedSpec


def paged_attention_kernel(refs: PagedRefs, *, spec: PagedSpec) -> None:
    """Computes one core's part of the work list: a prologue, the main loop over items, and the copies of the last
    results.
    """
    core = pl.program_id(0)
    first, end = refs.first_item_of_core[core], refs.first_item_of_core[core + 1]

    @pl.when(first < end)
    def _() -> None:
        item = WorkItem(refs.work_items, first)
        # The first items' pages are copied right after this, so their new tokens are written first, without overlap.
        if refs.write_counts is not None:
            fori_loop(
                first, jnp.minimum(first + PREFETCHED_BLOCKS, end), partial(_write_new_tokens, refs, spec), jnp.int32(0)
            )

        # Prologue: fill all pipeline stages but the one that the first iteration of the main loop fills.
        def start_prefetch(slot: Any, cursor: PrefetchCursor) -> PrefetchCursor:
            block = _block_of_cursor(refs, cursor, slot, end)
            exists = cursor.item_index < end
            pl.when(exists)(lambda: copies.start_page_copies(refs, block, spec))
            if spec.pair_bias_columns:
                pl.when(exists)(lambda: pair_bias.copy_pair_bias(refs, block, spec, wait=False))
            if refs.function_rows_by_key is not None:
                pl.when(exists)(lambda: pair_functions.copy_key_rows(refs, block, spec, wait=False))
            pl.when(slot == 0)(lambda: copies.copy_queries(refs, item, 0, spec, wait=False))
            return cursor.cursor_of_next_block(refs.work_items, end)

        cursor = fori_loop(jnp.int32(0), PREFETCHED_BLOCKS, start_prefetch, PrefetchCursor(first, item.first_block))
        fori_loop(first, end, lambda k, state: _process_item(refs, k, first, end, state, spec), (jnp.int32(0), cursor))

        # Output buffers alternate between two slots, so the copies of two items may still be in flight at the end.
        def wait_for_results(k: jax.Array, carry: jax.Array) -> jax.Array:
            copies.copy_results(refs, WorkItem(refs.work_items, k), (k - first) % 2, spec, wait=True)
            return carry

        fori_loop(jnp.maximum(first, end - 2), end, wait_for_results, jnp.int32(0))


def _write_new_tokens(refs: PagedRefs, spec: PagedSpec, index: Any, carry: Any) -> Any:
    """Writes an item's new tokens, and waits for the writes."""
    copies.start_cache_writes(refs, WorkItem(refs.work_items, index), spec)
    copies.wait_for_cache_writes(refs, spec)
    return carry


def _block_of_cursor(refs: PagedRefs, cursor: PrefetchCursor, slot: Any, end: Any) -> KeyBlock:
    return KeyBlock(WorkItem(refs.work_items, jnp.minimum(cursor.item_index, end - 1)), cursor.block_index, slot)


def _process_item(
    refs: PagedRefs, index: Any, first: Any, end: Any, state: tuple[Any, PrefetchCursor], spec: PagedSpec
) -> tuple[Any, PrefetchCursor]:
    """Computes an item. The state is the buffer slot of its first block, and the next block to copy."""
    item, buffer_slot = WorkItem(refs.work_items, index), (index - first) % 2

    @pl.when(index + 1 < end)
    def _() -> None:
        copies.copy_queries(refs, WorkItem(refs.work_items, index + 1), 1 - buffer_slot, spec, wait=False)

    # Item `index + PREFETCH` is the last whose first block may be copied while this item is computed (see the hazard
    # above).
    writes = (index + PREFETCHED_BLOCKS < end) if refs.write_counts is not None else None
    if writes is not None:
        pl.when(writes)(
            lambda: copies.start_cache_writes(refs, WorkItem(refs.work_items, index + PREFETCHED_BLOCKS), spec)
        )
    has_few_rows = item.num_tokens * spec.group_size <= spec.smallest_product_rows
    call_with_row_count(
        has_few_rows, spec, lambda count: for_each_index(spec.kv_heads, lambda head: init_softmax(refs, head, count))
    )
    copies.copy_queries(refs, item, buffer_slot, spec, wait=True)

    # This item's output buffer is free once the results of the item two before have been copied out of it.
    @pl.when(index - first >= 2)
    def _() -> None:
        copies.copy_results(refs, WorkItem(refs.work_items, index - 2), buffer_slot, spec, wait=True)

    start, count = item.first_block, item.end_block - item.first_block

    def attend_block_of_item(k: jax.Array, state: tuple[Any, PrefetchCursor]) -> tuple[Any, PrefetchCursor]:
        slot, cursor = state
        if writes is not None:
            pl.when(writes & (k + 1 == count))(lambda: copies.wait_for_cache_writes(refs, spec))
        prefetch = _block_of_cursor(refs, cursor, jnp.where(slot == 0, PREFETCHED_BLOCKS, slot - 1), end)
        following = jnp.where(slot == PREFETCHED_BLOCKS, 0, slot + 1), cursor.cursor_of_next_block(refs.work_items, end)
        attend_block(refs, KeyBlock(item, start + k, slot), prefetch, cursor.item_index < end, buffer_slot, spec)
        return following

    state = fori_loop(jnp.int32(0), count, attend_block_of_item, state)

    call_with_row_count(has_few_rows, spec, lambda count: _finish_item(refs, item, buffer_slot, count, spec))
    copies.copy_results(refs, item, buffer_slot, spec, wait=False)
    return state


def _finish_item(refs: PagedRefs, item: WorkItem, buffer_slot: Any, count: int, spec: PagedSpec) -> None:
    def write_head_results(k: Any) -> None:
        for start in range(0, count, 128):
            write_results(refs, k, ProductRows(buffer_slot, start, min(128, count - start), item.first_position), spec)

    for_each_index(spec.kv_heads, write_head_results)
