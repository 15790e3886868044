"""The kernel: items of the list of work, one after another, and the blocks of keys of each (Kwon et al. 2023).

What the next block needs is copied while one is computed with: pages are found in the table in scalar memory, and those
that nobody attends are not copied. New tokens are copied into their pages while the item before theirs is computed.
"""

import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.paged_attention import copies
from ejkernel_pallas.tpu.paged_attention.copies import Item
from ejkernel_pallas.tpu.paged_attention.keys import Chunk, load, turns
from ejkernel_pallas.tpu.paged_attention.softmax import Part, Refs, Rows, allowed, begin, finish, fold
from ejkernel_pallas.tpu.paged_attention.spec import Spec

HEADS = 4
"""Heads whose products of many rows are made together."""


def kernel(*refs: Any, names: tuple[str, ...], spec: Spec) -> None:
    """One part of the work."""
    named = dict(zip(names, refs, strict=True))
    part = pl.program_id(0)
    first, end = named["spans"][part], named["spans"][part + 1]

    @pl.when(first < end)
    def _() -> None:
        item = Item(named["items"], first)
        if "writes" in named:
            copies.start_writes(named, item, spec)
        copies.queries(named, item, 0, spec, wait=False)
        if "writes" in named:
            copies.wait_writes(named, spec)
        copies.start_pages(named, item, copies.first_block(item, spec), 0, spec)
        lax.fori_loop(first, end, lambda k, slot: _item(named, k, first, end, slot, spec), jnp.int32(0))

        def left(k: jax.Array, carry: jax.Array) -> jax.Array:
            copies.results(named, Item(named["items"], k), (k - first) % 2, spec, wait=True)
            return carry

        lax.fori_loop(jnp.maximum(first, end - 2), end, left, jnp.int32(0))


def _item(refs: Refs, index: Any, first: Any, end: Any, slot: Any, spec: Spec) -> Any:
    """Computes an item; returns the buffer that the next one's first block is in."""
    item, following = Item(refs["items"], index), Item(refs["items"], jnp.minimum(index + 1, end - 1))
    more, side = index + 1 < end, (index - first) % 2

    @pl.when(more)
    def _() -> None:
        copies.queries(refs, following, 1 - side, spec, wait=False)
        if "writes" in refs:
            copies.start_writes(refs, following, spec)

    small = item.tokens * spec.group <= spec.few
    by_size(small, spec, lambda count: begin(refs, count))
    copies.queries(refs, item, side, spec, wait=True)
    start, count = copies.first_block(item, spec), copies.blocks(item, spec)

    def block(k: jax.Array, slot: jax.Array) -> jax.Array:
        @pl.when(k + 1 < count)
        def _() -> None:
            copies.start_pages(refs, item, start + k + 1, 1 - slot, spec)

        @pl.when((k + 1 == count) & more)
        def _() -> None:
            if "writes" in refs:
                copies.wait_writes(refs, spec)
            copies.start_pages(refs, following, copies.first_block(following, spec), 1 - slot, spec)

        copies.wait_pages(refs, item, start + k, slot, spec)
        _block(refs, item, start + k, slot, side, spec)
        return 1 - slot

    slot = lax.fori_loop(jnp.int32(0), count, block, slot)

    @pl.when(index - first >= 2)
    def _() -> None:
        copies.results(refs, Item(refs["items"], index - 2), side, spec, wait=True)

    by_size(small, spec, lambda count: _finish(refs, item, side, count, spec))
    copies.results(refs, item, side, spec, wait=False)
    return slot


def by_size(small: Any, spec: Spec, act: Any) -> None:
    """Calls `act` with how many rows an item has: few, or those of a whole tile."""
    if spec.rows == spec.few:
        act(spec.few)
        return

    @pl.when(small)
    def _() -> None:
        act(spec.few)

    @pl.when(jnp.logical_not(small))
    def _() -> None:
        act(spec.rows)


def _block(refs: Refs, item: Item, block: Any, slot: Any, side: Any, spec: Spec) -> None:
    """Takes the chunks of a block that an item attends, as many at once as there are rounds."""
    base, size = block * spec.block, spec.chunk * spec.rounds
    first = jnp.clip((item.low - base) // size, 0, spec.block // size)
    end = jnp.clip((item.high - base + size - 1) // size, first, spec.block // size)
    small = item.tokens * spec.group <= spec.few

    def some(k: jax.Array, carry: jax.Array) -> jax.Array:
        start = pl.multiple_of(k * size, size)
        by_size(small, spec, lambda count: _chunks(refs, item, slot, base, start, side, count, spec))
        return carry

    lax.fori_loop(first, end, some, jnp.int32(0))


def _chunks(refs: Refs, item: Item, slot: Any, base: Any, start: Any, side: Any, count: int, spec: Spec) -> None:
    """Takes chunks of keys, masked where that is needed."""
    last, key, end = item.position + item.tokens - 1, base + start, base + start + spec.chunk * spec.rounds
    low = item.low if spec.left is None else jnp.maximum(item.low, last - spec.left)
    high = item.high if spec.right is None else jnp.minimum(item.high, item.position + spec.right + 1)
    plain = (key >= low) & (end <= high) & (item.holes == 0)
    take = _few if count == spec.few else _many

    def chunks(masked: bool) -> list[Chunk]:
        offsets = [pl.multiple_of(start + k * spec.chunk, spec.chunk) for k in range(spec.rounds)]
        return [Chunk(slot, x, base + x, item.low, item.high, masked) for x in offsets]

    @pl.when(plain)
    def _() -> None:
        take(refs, item, chunks(False), side, count, spec)

    @pl.when(jnp.logical_not(plain))
    def _() -> None:
        take(refs, item, chunks(True), side, count, spec)


def _few(refs: Refs, item: Item, chunks: list[Chunk], side: Any, count: int, spec: Spec) -> None:
    """Few rows of all heads."""
    rows = Rows(side, 0, count, item.position)
    kept = [allowed(refs, item, rows, at, spec) for at in chunks]
    heads = spec.kv_heads // turns(spec)

    def turn(k: Any) -> None:
        def parts(at: Chunk, keep: Any) -> list[Part]:
            keys, values = (_Loaded(refs, k, at, spec, which) for which in (False, True))
            return [
                Part(k * heads + n, rows, partial(keys.head, n), partial(values.head, n), keep) for n in range(heads)
            ]

        fold(refs, [parts(at, keep) for at, keep in zip(chunks, kept, strict=True)], spec)

    _times(turns(spec), turn)


class _Loaded:
    """Keys or values of a turn's heads, loaded when the first is asked for."""

    def __init__(self, refs: Refs, turn: Any, at: Chunk, spec: Spec, values: bool) -> None:
        self._load = functools.cache(lambda: load(_buffers(refs), turn, at, spec, values=values))

    def head(self, n: int) -> jax.Array:
        return self._load()[n]


def _many(refs: Refs, item: Item, chunks: list[Chunk], side: Any, count: int, spec: Spec) -> None:
    """A tile's rows, a head after the other, and as many at once as make a good product."""
    keys, values, heads = refs["head_keys"], refs["head_values"], spec.kv_heads // turns(spec)
    parts = (item.tokens * spec.group + spec.row_chunk - 1) // spec.row_chunk
    (at,) = chunks

    def turn(k: Any) -> None:
        for target, which in ((keys, False), (values, True)):
            for n, rows in enumerate(load(_buffers(refs), k, at, spec, values=which)):
                target[k * heads + n] = rows

    together = next(n for n in (HEADS, 2, 1) if spec.kv_heads % n == 0)

    def some(k: Any) -> None:
        def part(n: jax.Array, carry: jax.Array) -> jax.Array:
            rows = Rows(side, pl.multiple_of(n * spec.row_chunk, spec.row_chunk), spec.row_chunk, item.position)
            kept = allowed(refs, item, rows, at, spec)
            heads = [k * together + head for head in range(together)]
            get = operator.getitem
            fold(refs, [[Part(x, rows, partial(get, keys, x), partial(get, values, x), kept) for x in heads]], spec)
            return carry

        lax.fori_loop(jnp.int32(0), parts, part, jnp.int32(0))

    _times(turns(spec), turn)
    _times(spec.kv_heads // together, some)


def _buffers(refs: Refs) -> tuple[Any, ...]:
    return tuple(refs[name + "_buffer"] for name in ("keys", "values") if name in refs)


def _finish(refs: Refs, item: Item, side: Any, count: int, spec: Spec) -> None:
    def head(k: Any) -> None:
        for start in range(0, count, 128):
            finish(refs, k, Rows(side, start, min(128, count - start), item.position), spec)

    _times(spec.kv_heads, head)


def _times(count: int, act: Any) -> None:
    if count == 1:
        act(0)
        return

    def once(k: jax.Array, carry: jax.Array) -> jax.Array:
        act(k)
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(count), once, jnp.int32(0))
