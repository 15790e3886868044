"""The kernel's DMA: copies pages and queries to VMEM, results to HBM, and new tokens into pages.

    start_pages / sliced_starts ─► pages_arrived[slot] ─► wait_pages     HBM pages   ─► keys_buffer[slot]
    queries(wait=False) ─────────► query_arrived[slot] ─► (wait=True)    HBM rows    ─► query_buffer[slot]
    results(wait=False) ─────────► results_sent[slot] ──► (wait=True)    output_buffer[slot] ─► HBM rows
    start_writes ────────────────► tokens_written ──────► wait_writes    new tokens  ─► HBM pages

One semaphore counts the bytes of all copies to a slot, so one wait for the size of the slot waits for all of them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

COPIES_PER_STEP = 8
"""The number of pages whose copies start without a branch in between: a branch costs the scalar unit more than a
predicated copy.
"""


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One entry of the work list, with the fields of `ITEM_FIELDS`. They are loaded from scalar memory at each use, so
    that they occupy no registers.

    Attributes:
        items: The work list, in scalar memory.
        index: Index of the entry.
    """

    items: Any
    index: Any

    def __getattr__(self, name: str) -> Any:
        return self.items[ITEM_FIELDS.index(name) * (self.items.shape[0] // len(ITEM_FIELDS)) + self.index]


class KeyBlock(NamedTuple):
    """A block of an item's keys.

    Attributes:
        item: The work item.
        index_in_sequence: Index of the block among the sequence's blocks of `block_kv` keys.
        buffer_slot: The slot of the buffers in VMEM that the block is copied to.
    """

    item: WorkItem
    index_in_sequence: Any
    buffer_slot: Any

    def page_range(self, spec: PagedSpec) -> tuple[Any, Any]:
        """Returns the first page of the block to copy, and one more than the last."""
        start = self.index_in_sequence * spec.pages_per_block
        first = jnp.clip(self.item.first_page - start, 0, spec.pages_per_block)
        return first, jnp.clip(self.item.end_page - start, first, spec.pages_per_block)

    def has_all_pages(self, spec: PagedSpec) -> Any:
        """Returns whether all pages of the block are copied."""
        first, end = self.page_range(spec)
        return (end - first == spec.pages_per_block) & (self.item.missing_pages == 0)

    def first_table_entry(self, spec: PagedSpec) -> Any:
        """Returns the index of the block's first page in the table."""
        return self.item.sequence * spec.pages_per_sequence + self.index_in_sequence * spec.pages_per_block


class PrefetchCursor(NamedTuple):
    """The next block to copy.

    Attributes:
        item_index: Index of its work item.
        block_index: Index of the block among its sequence's blocks.
    """

    item_index: Any
    block_index: Any

    def cursor_of_next_block(self, items: Any, end: Any) -> "PrefetchCursor":
        """Returns the cursor of the following block, of this item or of the next; `item_index` is `end` after the last
        block."""
        item = WorkItem(items, jnp.minimum(self.item_index, end - 1))
        has_next_block = self.block_index + 1 < item.end_block
        index = jnp.where(has_next_block, self.item_index, self.item_index + 1)
        next_item = WorkItem(items, jnp.minimum(index, end - 1))
        return PrefetchCursor(index, jnp.where(has_next_block, self.block_index + 1, next_item.first_block))


def start_page_copies(refs: PagedRefs, block: KeyBlock, spec: PagedSpec) -> None:
    """Starts the copies of a block's pages, several at a time without a branch between them."""
    first, end = block.page_range(spec)
    entry, per_step = block.first_table_entry(spec), math.gcd(spec.pages_per_block, COPIES_PER_STEP)

    def start_copies_of_step(k: jax.Array, carry: jax.Array) -> jax.Array:
        for page in (k * per_step + n for n in range(per_step)):
            page_id = refs.page_table[entry + page]
            exists = (page >= first) & (page < end) & (page_id >= 0)
            pl.when(exists)(functools.partial(_start_page_copy, refs, block, page_id, page, spec))
        return carry

    fori_loop(divide(first, per_step), divide(end + per_step - 1, per_step), start_copies_of_step, jnp.int32(0))


def sliced_page_copy_starts(
    refs: PagedRefs, block: KeyBlock, block_exists: Any, count: int, spec: PagedSpec
) -> Iterator[Callable[[], None]]:
    """Returns functions that each start some of the copies of a block's pages, if the block exists; no page may be
    missing.

    Each copy is predicated instead of branched around, so the compiler can schedule it next to computation.
    """
    entry = block.first_table_entry(spec)
    end = jnp.where(block_exists, block.page_range(spec)[1], 0)

    def start_copies_of_slice(pages: range) -> None:
        for page in pages:
            page_id = refs.page_table[entry + page]
            pl.when(page < end)(functools.partial(_start_page_copy, refs, block, page_id, page, spec))

    ends = [spec.pages_per_block * k // count for k in range(count + 1)]
    return (functools.partial(start_copies_of_slice, range(*pair)) for pair in itertools.pairwise(ends))


def _start_page_copy(refs: PagedRefs, block: KeyBlock, page_id: Any, page_in_block: Any, spec: PagedSpec) -> None:
    for copy in _page_copies(refs, page_id, block.buffer_slot, page_in_block, spec):
        copy.start()


def wait_for_page_copies(refs: PagedRefs, block: KeyBlock, attended_keys: tuple[Any, Any], spec: PagedSpec) -> None:
    """Waits for a block's pages. In pages that contain some of the keys `attended_keys`, it zeroes the keys that no row
    attends.

    VMEM that no copy has written may contain NaN, and a weight of 0 times NaN is NaN.
    """
    full = block.has_all_pages(spec)

    @pl.when(full)
    def _() -> None:
        for each in refs.buffers:
            # This copy of the buffer to itself is never started; it only gives the number of bytes to wait for.
            buffer = each.at[block.buffer_slot]
            pltpu.make_async_copy(buffer, buffer, refs.pages_arrived.at[block.buffer_slot]).wait()

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        slots, (first, end) = spec.cache_layout.slots_per_page, block.page_range(spec)
        _wait_for_each_page(refs, block, spec)
        # Pages in the chunks to be computed that were not copied: before the first copied page, and after the last.
        low = jnp.minimum(divide(attended_keys[0], slots), first)
        high = jnp.maximum(divide(attended_keys[1] + slots - 1, slots), end)

        def zero_uncopied_page(k: jax.Array, carry: jax.Array) -> jax.Array:
            _zero_page(refs, block, jnp.where(k < first, k, k - first + end), spec)
            return carry

        fori_loop(low, high - end + first, zero_uncopied_page, jnp.int32(0))

    # The last page of a sequence may be partly attended even where all pages of the block are copied.
    base, item = block.index_in_sequence * spec.block_kv, block.item

    @pl.when((base < item.first_key) | (base + spec.block_kv > item.end_key))
    def _() -> None:
        first, end = block.page_range(spec)
        fori_loop(
            first,
            jnp.where(first < end, first + 2, first),
            functools.partial(_zero_unattended_keys, refs, block, spec),
            jnp.int32(0),
        )


def _wait_for_each_page(refs: PagedRefs, block: KeyBlock, spec: PagedSpec) -> None:
    """Waits for a block's pages one by one, and zeroes the missing ones."""
    entry, (first, end) = block.first_table_entry(spec), block.page_range(spec)

    def wait(page: jax.Array, carry: jax.Array) -> jax.Array:
        @pl.when(refs.page_table[entry + page] >= 0)
        def _() -> None:
            for copy in _page_copies(refs, 0, block.buffer_slot, page, spec):
                copy.wait()

        return carry

    def zero_missing_page(page: jax.Array, carry: jax.Array) -> jax.Array:
        pl.when(refs.page_table[entry + page] < 0)(lambda: _zero_page(refs, block, page, spec))
        return carry

    fori_loop(first, end, wait, jnp.int32(0))
    fori_loop(jnp.where(block.item.missing_pages == 0, end, first), end, zero_missing_page, jnp.int32(0))


def _zero_page(refs: PagedRefs, block: KeyBlock, page_in_block: Any, spec: PagedSpec) -> None:
    for second, buffer in _buffers_to_zero(refs):
        index = _page_index(buffer, block.buffer_slot, page_in_block, spec, second)
        buffer[index] = jnp.zeros_like(buffer[index])


def _buffers_to_zero(refs: PagedRefs) -> list[tuple[bool, Any]]:
    """Returns the buffers that may hold NaN, which codes do not, and whether each is another than the first cache's."""
    return [(k > 0, x) for k, x in enumerate(refs.buffers) if x.dtype != jnp.uint8]


def _zero_unattended_keys(refs: PagedRefs, block: KeyBlock, spec: PagedSpec, k: Any, carry: Any) -> Any:
    """Zeroes the keys that no row attends, in the first page that is copied and in the last."""
    slots, item, (first, end) = spec.cache_layout.slots_per_page, block.item, block.page_range(spec)
    page = jnp.where(k == first, first, end - 1)
    start = block.index_in_sequence * spec.block_kv + page * slots

    @pl.when((start < item.first_key) | (start + slots > item.end_key))
    def _() -> None:
        for second, buffer in _buffers_to_zero(refs):
            index = _page_index(buffer, block.buffer_slot, page, spec, second)
            x = buffer[index]
            key = _slot_in_page(x.shape, spec) + start
            # The select is done in float32: some chips have none for narrower types.
            x = jnp.where((key >= item.first_key) & (key < item.end_key), x.astype(jnp.float32), 0.0)
            buffer[index] = x.astype(buffer.dtype)

    return carry


def _slot_in_page(shape: tuple[int, ...], spec: PagedSpec) -> jax.Array:
    """Returns the slot of every element of a page in a buffer, int32."""
    if spec.cache_layout.codes is not None:
        return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    slot = lax.broadcasted_iota(jnp.int32, shape, 1)  # also holds for transposed pages [D, slots]
    if spec.cache_layout.is_latent and not spec.cache_layout.is_head_major:  # [groups, slots / packing, packing, 128]
        return slot * spec.cache_layout.elements_per_word + lax.broadcasted_iota(jnp.int32, shape, 2)
    return slot


def _page_index(
    buffer: Any, buffer_slot: Any, page_in_block: Any, spec: PagedSpec, is_second_cache: bool
) -> tuple[Any, ...]:
    """Returns the index of a page in the buffer of the first or second cache."""
    slots = spec.cache_layout.slots_per_page
    if spec.cache_layout.codes is not None:
        tokens = pl.ds(pl.multiple_of(page_in_block * slots, slots), slots)
        return (buffer_slot, *(slice(None),) * (len(buffer.shape) - 2), tokens)
    if spec.cache_layout.has_tokens_along_lanes(is_second_cache):
        return buffer_slot, 0, slice(None), pl.ds(pl.multiple_of(page_in_block * slots, slots), slots)
    if spec.cache_layout.is_head_major:
        return buffer_slot, slice(None), pl.ds(pl.multiple_of(page_in_block * slots, slots), slots)
    return buffer_slot, slice(None), page_in_block


def _page_copies(refs: PagedRefs, page_id: Any, buffer_slot: Any, page_in_block: Any, spec: PagedSpec) -> list[Any]:
    """Returns the copies of one page of each cache to its place in a buffer."""
    cache, copies = spec.cache_layout, []
    for second, (source, target) in enumerate(refs.caches_and_buffers):
        index = _page_index(target, buffer_slot, page_in_block, spec, bool(second))
        if cache.codes is not None:
            pairs = [(source.at[page_id], target.at[index])]
        elif cache.has_tokens_along_lanes(bool(second)):
            # A sequence's pages are adjacent along lanes: id = sequence * entries + page.
            sequence = divide(page_id, spec.pages_per_sequence)
            start = pl.multiple_of(
                (page_id - sequence * spec.pages_per_sequence) * cache.slots_per_page, cache.slots_per_page
            )
            pairs = [(source.at[sequence, :, pl.ds(start, cache.slots_per_page)], target.at[index])]
        elif cache.is_head_major:
            source = source.at[:, page_id] if cache.layout == "hpsd" else source.at[page_id]
            pairs = [(source, target.at[index])]
        elif target.shape[1] == 1:
            pairs = [(source.at[page_id], target.at[buffer_slot, 0, page_in_block])]
        else:
            inner = (slice(None),) * (source.ndim - 2)
            parts = [(*inner, pl.ds(group * LANES, LANES)) for group in range(target.shape[1])]
            pairs = [
                (source.at[(page_id, *part)], target.at[buffer_slot, group, page_in_block])
                for group, part in enumerate(parts)
            ]
        copies += [pltpu.make_async_copy(x, y, refs.pages_arrived.at[buffer_slot]) for x, y in pairs]
    return copies


def _for_each_row_slice(refs: PagedRefs, item: WorkItem, slot: Any, spec: PagedSpec, copy_rows: Any) -> None:
    """Calls `copy_rows` with slices of rows of the tile and of the array: once with a whole tile, else with
    `query_rows_per_copy` rows each.
    """
    whole = item.num_tokens == spec.tokens_per_tile
    start = pl.multiple_of(item.first_row, spec.query_rows_per_copy)

    @pl.when(whole)
    def _() -> None:
        copy_rows(pl.ds(0, spec.rows_per_tile), pl.ds(start, spec.rows_per_tile))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        def copy_row_group(k: jax.Array, carry: jax.Array) -> jax.Array:
            offset = pl.multiple_of(k * spec.query_rows_per_copy, spec.query_rows_per_copy)
            copy_rows(
                pl.ds(offset, spec.query_rows_per_copy),
                pl.ds(pl.multiple_of(start + offset, spec.query_rows_per_copy), spec.query_rows_per_copy),
            )
            return carry

        count = divide(item.num_tokens * spec.group_size + spec.query_rows_per_copy - 1, spec.query_rows_per_copy)
        fori_loop(jnp.int32(0), count, copy_row_group, jnp.int32(0))


def copy_queries(refs: PagedRefs, item: WorkItem, slot: Any, spec: PagedSpec, *, wait: bool) -> None:
    """Starts the copies of an item's queries, and of what each of their rows has for itself, or waits for them."""
    arrived = refs.query_arrived.at[slot]
    by_row = ((refs.row_positions, refs.position_buffer), (refs.row_contexts, refs.context_buffer))

    def start_or_wait(tile: Any, rows: Any) -> None:
        copies = [pltpu.make_async_copy(refs.query.at[:, rows], refs.query_buffer.at[slot, :, tile], arrived)]
        copies += [
            pltpu.make_async_copy(source.at[rows], target.at[slot, tile], arrived)
            for source, target in by_row
            if source is not None
        ]
        if refs.function_rows_by_query is not None:
            source, target = refs.function_rows_by_query.at[:, rows], refs.function_queries_buffer.at[slot, :, tile]
            copies.append(pltpu.make_async_copy(source, target, arrived))
        for copy in copies:
            copy.wait() if wait else copy.start()

    _for_each_row_slice(refs, item, slot, spec, start_or_wait)


def copy_results(refs: PagedRefs, item: WorkItem, slot: Any, spec: PagedSpec, *, wait: bool) -> None:
    """Starts the copies of an item's output and lse, or waits for them."""

    def start_or_wait(tile: Any, rows: Any) -> None:
        copy = pltpu.make_async_copy(
            refs.output_buffer.at[slot, :, tile], refs.output.at[:, rows], refs.results_sent.at[slot]
        )
        copy.wait() if wait else copy.start()

    _for_each_row_slice(refs, item, slot, spec, start_or_wait)
    copy = pltpu.make_async_copy(refs.lse_buffer.at[slot], refs.lse.at[item.index], refs.results_sent.at[slot])
    copy.wait() if wait else copy.start()


def start_cache_writes(refs: PagedRefs, item: WorkItem, spec: PagedSpec) -> None:
    """Starts the copies of an item's new tokens into the cache: whole pages where tokens fill one, else single
    tokens.
    """
    slots = spec.cache_layout.slots_per_page
    count, token, position = item.num_new_tokens, item.first_token, item.first_position

    def start_next_write(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, pages, single_tokens = state
        at = position + done
        entry = divide(jnp.maximum(at, 0), slots)
        page_id = refs.page_table[
            item.sequence * spec.pages_per_sequence + jnp.minimum(entry, spec.pages_per_sequence - 1)
        ]
        exists = (page_id >= 0) & (entry < spec.pages_per_sequence) & (at >= 0)
        slot = jnp.maximum(at, 0) % slots
        full = (slot == 0) & (count - done >= slots) & (at >= 0)

        @pl.when(exists & full)
        def _() -> None:
            for copy in _page_write_copies(refs, token + done, page_id, spec):
                copy.start()

        @pl.when(exists & jnp.logical_not(full))
        def _() -> None:
            for copy in _slot_write_copies(refs, token + done, page_id, slot):
                copy.start()

        page_exists = exists.astype(jnp.int32)
        return (
            done + jnp.where(full, slots, 1),
            pages + page_exists * full.astype(jnp.int32),
            single_tokens + page_exists * (1 - full.astype(jnp.int32)),
        )

    zero = jnp.int32(0)
    _, pages, single_tokens = lax.while_loop(lambda state: state[0] < count, start_next_write, (zero, zero, zero))
    # How many copies were started, so that `wait_for_cache_writes` waits for the same number of each size.
    refs.write_counts[0] = pages
    refs.write_counts[1] = single_tokens


def wait_for_cache_writes(refs: PagedRefs, spec: PagedSpec) -> None:
    """Waits for the token copies that `start_cache_writes` started last."""

    def wait(copies: list[Any]) -> Any:
        def one(k: jax.Array, carry: jax.Array) -> jax.Array:
            for copy in copies:
                copy.wait()
            return carry

        return one

    zero = jnp.int32(0)
    fori_loop(zero, refs.write_counts[0], wait(_page_write_copies(refs, 0, 0, spec)), zero)
    fori_loop(zero, refs.write_counts[1], wait(_slot_write_copies(refs, 0, 0, 0)), zero)


def _page_write_copies(refs: PagedRefs, first_token: Any, page_id: Any, spec: PagedSpec) -> list[Any]:
    return [
        pltpu.make_async_copy(
            new.at[pl.ds(first_token, spec.cache_layout.slots_per_page)], pages.at[page_id], refs.tokens_written
        )
        for new, pages in refs.new_tokens_and_pages
    ]


def _slot_write_copies(refs: PagedRefs, token: Any, page_id: Any, slot_in_page: Any) -> list[Any]:
    return [
        pltpu.make_async_copy(new.at[token], pages.at[page_id, slot_in_page], refs.tokens_written)
        for new, pages in refs.new_tokens_and_pages
    ]
