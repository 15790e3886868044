"""What the kernel copies: pages and queries into its memory, results out of it, and new tokens into pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.paged_attention.spec import LANES, Spec
from ejkernel_pallas.tpu.paged_attention.work import FIELDS

TOGETHER = 8
"""Pages whose copies are started without a branch between them."""

Refs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Item:
    """One entry of the list of work: its fields are read from scalar memory when they are asked for."""

    items: Any
    index: Any

    def __getattr__(self, name: str) -> Any:
        return self.items[FIELDS.index(name) * (self.items.shape[0] // len(FIELDS)) + self.index]


def first_block(item: Item, spec: Spec) -> Any:
    """The first block of keys that an item attends."""
    return item.low // spec.block


def blocks(item: Item, spec: Spec) -> Any:
    """How many it attends; at least one, of which it may attend nothing."""
    return jnp.maximum((item.high + spec.block - 1) // spec.block - first_block(item, spec), 1)


def _pages(item: Item, block: Any, spec: Spec) -> tuple[Any, Any]:
    """First page of a block to copy, in the block, and one more than the last."""
    slots, start = spec.cache.slots, block * spec.block
    first = jnp.clip((item.low - start) // slots, 0, spec.pages)
    return first, jnp.clip((item.high - start + slots - 1) // slots, first, spec.pages)


def start_pages(refs: Refs, item: Item, block: Any, slot: Any, spec: Spec) -> None:
    """Starts the copies of a block's pages; what is absent becomes 0.

    Both loops are always run, one of them with nothing to do: the compiler would run them with what they do switched
    off, rather than skip them.
    """
    first, end = _pages(item, block, spec)
    entry = item.sequence * spec.entries + block * spec.pages
    full = _full(item, first, end, spec)

    def start(page: Any) -> None:
        for copy in _page_copies(refs, refs["tables"][entry + page], slot, page, spec):
            copy.start()

    def start_or_clear(page: jax.Array, carry: jax.Array) -> jax.Array:
        there = refs["tables"][entry + page] >= 0
        pl.when(there)(lambda: start(page))

        @pl.when(jnp.logical_not(there))
        def _() -> None:
            for name in _caches(refs):
                buffer, place = refs[name + "_buffer"], _page_place(slot, page, spec)
                buffer[place] = jnp.zeros_like(buffer[place])

        return carry

    together = TOGETHER if spec.pages % TOGETHER == 0 else 1

    def several(k: jax.Array, carry: jax.Array) -> jax.Array:
        for page in range(together):
            start(k * together + page)
        return carry

    zero = jnp.int32(0)
    lax.fori_loop(zero, jnp.where(full, spec.pages // together, 0), several, zero)
    lax.fori_loop(jnp.where(full, end, first), end, start_or_clear, zero)


def _full(item: Item, first: Any, end: Any, spec: Spec) -> Any:
    """Whether all pages of a block are copied."""
    return (end - first == spec.pages) & (item.holes == 0)


def wait_pages(refs: Refs, item: Item, block: Any, slot: Any, spec: Spec) -> None:
    """Waits for them."""
    first, end = _pages(item, block, spec)
    entry = item.sequence * spec.entries + block * spec.pages
    full = _full(item, first, end, spec)

    @pl.when(full)
    def _() -> None:
        for name in _caches(refs):
            buffer = refs[name + "_buffer"].at[slot]
            pltpu.make_async_copy(buffer, buffer, refs["arrived"].at[slot]).wait()

    def wait(page: jax.Array, carry: jax.Array) -> jax.Array:
        @pl.when(refs["tables"][entry + page] >= 0)
        def _() -> None:
            for copy in _page_copies(refs, 0, slot, page, spec):
                copy.wait()

        return carry

    lax.fori_loop(jnp.where(full, end, first), end, wait, jnp.int32(0))


def _caches(refs: Refs) -> tuple[str, ...]:
    return tuple(name for name in ("keys", "values") if name in refs)


def _page_place(slot: Any, page: Any, spec: Spec) -> tuple[Any, ...]:
    """A page's place in a buffer."""
    slots = spec.cache.slots
    if spec.cache.head_major:
        return slot, slice(None), pl.ds(pl.multiple_of(page * slots, slots), slots)
    return slot, slice(None), page


def _page_copies(refs: Refs, number: Any, slot: Any, page: Any, spec: Spec) -> list[Any]:
    """The copies of a page of the caches to its place in a buffer."""
    cache, made = spec.cache, []
    for name in _caches(refs):
        source, target = refs[name], refs[name + "_buffer"]
        if cache.head_major:
            source = source.at[:, number] if cache.layout == "hpsd" else source.at[number]
            pairs = [(source, target.at[_page_place(slot, page, spec)])]
        elif target.shape[1] == 1:
            pairs = [(source.at[number], target.at[slot, 0, page])]
        else:
            inner = (slice(None),) * (source.ndim - 2)
            parts = [(*inner, pl.ds(group * LANES, LANES)) for group in range(target.shape[1])]
            pairs = [(source.at[(number, *part)], target.at[slot, group, page]) for group, part in enumerate(parts)]
        made += [pltpu.make_async_copy(x, y, refs["arrived"].at[slot]) for x, y in pairs]
    return made


def _query_copies(refs: Refs, item: Item, slot: Any, spec: Spec, copy: Any) -> None:
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

        count = (item.tokens * spec.group + spec.grain - 1) // spec.grain
        lax.fori_loop(jnp.int32(0), count, part, jnp.int32(0))


def queries(refs: Refs, item: Item, slot: Any, spec: Spec, *, wait: bool) -> None:
    """Starts the copy of an item's queries, or waits for it."""

    def copy(tile: Any, rows: Any) -> None:
        made = pltpu.make_async_copy(
            refs["query"].at[:, rows], refs["query_buffer"].at[slot, :, tile], refs["asked"].at[slot]
        )
        made.wait() if wait else made.start()

    _query_copies(refs, item, slot, spec, copy)


def results(refs: Refs, item: Item, slot: Any, spec: Spec, *, wait: bool) -> None:
    """Starts the copies of an item's output and lse, or waits for them."""

    def copy(tile: Any, rows: Any) -> None:
        made = pltpu.make_async_copy(
            refs["output_buffer"].at[slot, :, tile], refs["output"].at[:, rows], refs["left"].at[slot]
        )
        made.wait() if wait else made.start()

    _query_copies(refs, item, slot, spec, copy)
    made = pltpu.make_async_copy(refs["lse_buffer"].at[slot], refs["lse"].at[item.index], refs["left"].at[slot])
    made.wait() if wait else made.start()


def start_writes(refs: Refs, item: Item, spec: Spec) -> None:
    """Starts the copies of an item's new tokens to their slots, page by page where they fill one, else one by one."""
    slots = spec.cache.slots
    count, token, position = item.fresh, item.token, item.position

    def run(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, pages, singles = state
        at = position + done
        entry = jnp.maximum(at, 0) // slots
        number = refs["tables"][item.sequence * spec.entries + jnp.minimum(entry, spec.entries - 1)]
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
    refs["writes"][0] = pages
    refs["writes"][1] = singles


def wait_writes(refs: Refs, spec: Spec) -> None:
    """Waits for the copies that were started last."""

    def wait(made: list[Any]) -> Any:
        def one(k: jax.Array, carry: jax.Array) -> jax.Array:
            for copy in made:
                copy.wait()
            return carry

        return one

    zero = jnp.int32(0)
    lax.fori_loop(zero, refs["writes"][0], wait(_page_writes(refs, 0, 0, spec)), zero)
    lax.fori_loop(zero, refs["writes"][1], wait(_slot_writes(refs, 0, 0, 0)), zero)


def _page_writes(refs: Refs, token: Any, page: Any, spec: Spec) -> list[Any]:
    pairs = [(refs["new_" + name], refs[name]) for name in _caches(refs)]
    return [
        pltpu.make_async_copy(new.at[pl.ds(token, spec.cache.slots)], pages.at[page], refs["written"])
        for new, pages in pairs
    ]


def _slot_writes(refs: Refs, token: Any, page: Any, slot: Any) -> list[Any]:
    pairs = [(refs["new_" + name], refs[name]) for name in _caches(refs)]
    return [pltpu.make_async_copy(new.at[token], pages.at[page, slot], refs["written"]) for new, pages in pairs]
