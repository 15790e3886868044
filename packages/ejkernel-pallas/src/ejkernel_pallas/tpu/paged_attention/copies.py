"""What the kernel copies: pages and queries into its memory, results out of it, and new tokens into pages."""

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
from ejkernel_pallas.tpu.mosaic.loops import loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import Spec
from ejkernel_pallas.tpu.paged_attention.work import FIELDS

TOGETHER = 8
"""Pages whose copies are started without a branch between them."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One entry of the list of work: its fields are read from scalar memory when they are asked for."""

    items: Any
    index: Any

    def __getattr__(self, name: str) -> Any:
        return self.items[FIELDS.index(name) * (self.items.shape[0] // len(FIELDS)) + self.index]


class Block(NamedTuple):
    """A block of an item's keys, by its number in the sequence, and the buffer that it is copied to."""

    item: Item
    number: Any
    slot: Any

    def pages(self, spec: Spec) -> tuple[Any, Any]:
        """First page to copy, in the block, and one more than the last."""
        start = self.number * spec.pages
        first = jnp.clip(self.item.first_page - start, 0, spec.pages)
        return first, jnp.clip(self.item.end_page - start, first, spec.pages)

    def full(self, spec: Spec) -> Any:
        """Whether all of its pages are copied."""
        first, end = self.pages(spec)
        return (end - first == spec.pages) & (self.item.holes == 0)

    def entry(self, spec: Spec) -> Any:
        """Of its first page in the table."""
        return self.item.sequence * spec.entries + self.number * spec.pages


class Cursor(NamedTuple):
    """The next block to copy: an item, and the block's number in its sequence."""

    index: Any
    number: Any

    def after(self, items: Any, end: Any) -> "Cursor":
        """The one after it, of the same item or of the next; of none if that is `end`."""
        item = Item(items, jnp.minimum(self.index, end - 1))
        more = self.number + 1 < item.end_block
        index = jnp.where(more, self.index, self.index + 1)
        following = Item(items, jnp.minimum(index, end - 1))
        return Cursor(index, jnp.where(more, self.number + 1, following.first_block))


def start_pages(refs: PagedRefs, block: Block, spec: Spec) -> None:
    """Starts the copies of a block's pages, of which several have no branch between them."""
    first, end = block.pages(spec)
    entry, together = block.entry(spec), math.gcd(spec.pages, TOGETHER)

    def several(k: jax.Array, carry: jax.Array) -> jax.Array:
        for page in (k * together + n for n in range(together)):
            number = refs.tables[entry + page]
            there = (page >= first) & (page < end) & (number >= 0)
            pl.when(there)(functools.partial(_start, refs, block, number, page, spec))
        return carry

    loop(divide(first, together), divide(end + together - 1, together), several, jnp.int32(0))


def pieces(refs: PagedRefs, block: Block, there: Any, count: int, spec: Spec) -> Iterator[Callable[[], None]]:
    """What starts the copies of a block's pages up to its last, if it is there, in pieces; none of them is absent.

    Each copy has a condition of its own, which is no branch: the compiler can have them beside computations.
    """
    entry = block.entry(spec)
    end = jnp.where(there, block.pages(spec)[1], 0)

    def piece(pages: range) -> None:
        for page in pages:
            number = refs.tables[entry + page]
            pl.when(page < end)(functools.partial(_start, refs, block, number, page, spec))

    ends = [spec.pages * k // count for k in range(count + 1)]
    return (functools.partial(piece, range(*pair)) for pair in itertools.pairwise(ends))


def _start(refs: PagedRefs, block: Block, number: Any, page: Any, spec: Spec) -> None:
    for copy in _page_copies(refs, number, block.slot, page, spec):
        copy.start()


def wait_pages(refs: PagedRefs, block: Block, keys: tuple[Any, Any], spec: Spec) -> None:
    """Waits for a block's pages, and makes 0 what nobody attends of those that have some of the given keys.

    Memory may have numbers there that are none, which no weight of 0 makes disappear.
    """
    full = block.full(spec)

    @pl.when(full)
    def _() -> None:
        for each in refs.buffers:
            buffer = each.at[block.slot]
            pltpu.make_async_copy(buffer, buffer, refs.pages_arrived.at[block.slot]).wait()

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        slots, (first, end) = spec.cache.slots, block.pages(spec)
        _wait_each(refs, block, spec)
        low = jnp.minimum(divide(keys[0], slots), first)
        high = jnp.maximum(divide(keys[1] + slots - 1, slots), end)

        def clear(k: jax.Array, carry: jax.Array) -> jax.Array:
            _clear(refs, block, jnp.where(k < first, k, k - first + end), spec)
            return carry

        loop(low, high - end + first, clear, jnp.int32(0))
        loop(first, jnp.where(first < end, first + 2, first), functools.partial(_cut, refs, block, spec), jnp.int32(0))


def _wait_each(refs: PagedRefs, block: Block, spec: Spec) -> None:
    """Waits for a block's pages one by one; what is absent becomes 0."""
    entry, (first, end) = block.entry(spec), block.pages(spec)

    def wait(page: jax.Array, carry: jax.Array) -> jax.Array:
        @pl.when(refs.tables[entry + page] >= 0)
        def _() -> None:
            for copy in _page_copies(refs, 0, block.slot, page, spec):
                copy.wait()

        return carry

    def clear(page: jax.Array, carry: jax.Array) -> jax.Array:
        pl.when(refs.tables[entry + page] < 0)(lambda: _clear(refs, block, page, spec))
        return carry

    loop(first, end, wait, jnp.int32(0))
    loop(jnp.where(block.item.holes == 0, end, first), end, clear, jnp.int32(0))


def _clear(refs: PagedRefs, block: Block, page: Any, spec: Spec) -> None:
    for buffer in refs.buffers:
        place = _page_place(block.slot, page, spec)
        buffer[place] = jnp.zeros_like(buffer[place])


def _cut(refs: PagedRefs, block: Block, spec: Spec, k: Any, carry: Any) -> Any:
    """Makes the keys 0 that nobody attends of the first page that is copied, and then of the last."""
    slots, item, (first, end) = spec.cache.slots, block.item, block.pages(spec)
    page = jnp.where(k == first, first, end - 1)
    start = block.number * spec.block + page * slots

    @pl.when((start < item.low) | (start + slots > item.high))
    def _() -> None:
        for buffer in refs.buffers:
            place = _page_place(block.slot, page, spec)
            x = buffer[place]
            key = lax.broadcasted_iota(jnp.int32, x.shape, 1) + start
            # The way over float32: not all chips can select among narrower numbers.
            x = jnp.where((key >= item.low) & (key < item.high), x.astype(jnp.float32), 0.0)
            buffer[place] = x.astype(buffer.dtype)

    return carry


def _page_place(slot: Any, page: Any, spec: Spec) -> tuple[Any, ...]:
    """A page's place in a buffer."""
    slots = spec.cache.slots
    if spec.cache.head_major:
        return slot, slice(None), pl.ds(pl.multiple_of(page * slots, slots), slots)
    return slot, slice(None), page


def _page_copies(refs: PagedRefs, number: Any, slot: Any, page: Any, spec: Spec) -> list[Any]:
    """The copies of a page of the caches to its place in a buffer."""
    cache, made = spec.cache, []
    for source, target in refs.caches:
        if cache.head_major:
            source = source.at[:, number] if cache.layout == "hpsd" else source.at[number]
            pairs = [(source, target.at[_page_place(slot, page, spec)])]
        elif target.shape[1] == 1:
            pairs = [(source.at[number], target.at[slot, 0, page])]
        else:
            inner = (slice(None),) * (source.ndim - 2)
            parts = [(*inner, pl.ds(group * LANES, LANES)) for group in range(target.shape[1])]
            pairs = [(source.at[(number, *part)], target.at[slot, group, page]) for group, part in enumerate(parts)]
        made += [pltpu.make_async_copy(x, y, refs.pages_arrived.at[slot]) for x, y in pairs]
    return made


def _query_copies(refs: PagedRefs, item: Item, slot: Any, spec: Spec, copy: Any) -> None:
    """Calls `copy` with slices of rows, of the item's tile and of all: one, or one for every few rows that it has."""
    whole = item.tokens == spec.tokens
    start = pl.multiple_of(item.row, spec.grain)

    @pl.when(whole)
    def _() -> None:
        copy(pl.ds(0, spec.rows), pl.ds(start, spec.rows))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        def part(k: jax.Array, carry: jax.Array) -> jax.Array:
            offset = pl.multiple_of(k * spec.grain, spec.grain)
            copy(pl.ds(offset, spec.grain), pl.ds(pl.multiple_of(start + offset, spec.grain), spec.grain))
            return carry

        count = divide(item.tokens * spec.group + spec.grain - 1, spec.grain)
        loop(jnp.int32(0), count, part, jnp.int32(0))


def queries(refs: PagedRefs, item: Item, slot: Any, spec: Spec, *, wait: bool) -> None:
    """Starts the copy of an item's queries, or waits for it."""

    def copy(tile: Any, rows: Any) -> None:
        made = pltpu.make_async_copy(
            refs.query.at[:, rows], refs.query_buffer.at[slot, :, tile], refs.query_arrived.at[slot]
        )
        made.wait() if wait else made.start()

    _query_copies(refs, item, slot, spec, copy)


def results(refs: PagedRefs, item: Item, slot: Any, spec: Spec, *, wait: bool) -> None:
    """Starts the copies of an item's output and lse, or waits for them."""

    def copy(tile: Any, rows: Any) -> None:
        made = pltpu.make_async_copy(
            refs.output_buffer.at[slot, :, tile], refs.output.at[:, rows], refs.results_sent.at[slot]
        )
        made.wait() if wait else made.start()

    _query_copies(refs, item, slot, spec, copy)
    made = pltpu.make_async_copy(refs.lse_buffer.at[slot], refs.lse.at[item.index], refs.results_sent.at[slot])
    made.wait() if wait else made.start()


def start_writes(refs: PagedRefs, item: Item, spec: Spec) -> None:
    """Starts the copies of an item's new tokens to their slots, page by page where they fill one, else one by one."""
    slots = spec.cache.slots
    count, token, position = item.fresh, item.token, item.position

    def run(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, pages, singles = state
        at = position + done
        entry = divide(jnp.maximum(at, 0), slots)
        number = refs.tables[item.sequence * spec.entries + jnp.minimum(entry, spec.entries - 1)]
        there = (number >= 0) & (entry < spec.entries) & (at >= 0)
        slot = jnp.maximum(at, 0) % slots
        full = (slot == 0) & (count - done >= slots) & (at >= 0)

        @pl.when(there & full)
        def _() -> None:
            for made in _page_writes(refs, token + done, number, spec):
                made.start()

        @pl.when(there & jnp.logical_not(full))
        def _() -> None:
            for made in _slot_writes(refs, token + done, number, slot):
                made.start()

        here = there.astype(jnp.int32)
        return (
            done + jnp.where(full, slots, 1),
            pages + here * full.astype(jnp.int32),
            singles + here * (1 - full.astype(jnp.int32)),
        )

    zero = jnp.int32(0)
    _, pages, singles = lax.while_loop(lambda state: state[0] < count, run, (zero, zero, zero))
    refs.write_counts[0] = pages
    refs.write_counts[1] = singles


def wait_writes(refs: PagedRefs, spec: Spec) -> None:
    """Waits for the copies that were started last."""

    def wait(made: list[Any]) -> Any:
        def one(k: jax.Array, carry: jax.Array) -> jax.Array:
            for copy in made:
                copy.wait()
            return carry

        return one

    zero = jnp.int32(0)
    loop(zero, refs.write_counts[0], wait(_page_writes(refs, 0, 0, spec)), zero)
    loop(zero, refs.write_counts[1], wait(_slot_writes(refs, 0, 0, 0)), zero)


def _page_writes(refs: PagedRefs, token: Any, page: Any, spec: Spec) -> list[Any]:
    return [
        pltpu.make_async_copy(new.at[pl.ds(token, spec.cache.slots)], pages.at[page], refs.tokens_written)
        for new, pages in refs.written
    ]


def _slot_writes(refs: PagedRefs, token: Any, page: Any, slot: Any) -> list[Any]:
    return [
        pltpu.make_async_copy(new.at[token], pages.at[page, slot], refs.tokens_written) for new, pages in refs.written
    ]
