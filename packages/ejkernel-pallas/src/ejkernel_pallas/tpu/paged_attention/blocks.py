"""A block of keys: the softmax of an item's rows is updated with it, chunk by chunk."""

import functools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import each, loop
from ejkernel_pallas.tpu.paged_attention import copies
from ejkernel_pallas.tpu.paged_attention.copies import Block, Item
from ejkernel_pallas.tpu.paged_attention.keys import Chunk, load, turns
from ejkernel_pallas.tpu.paged_attention.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.softmax import Mask, Part, Rows, masks, store_key_mask, update_softmax
from ejkernel_pallas.tpu.paged_attention.spec import Spec

HEADS = 4
"""Heads whose products of many rows are made together."""


def by_size(small: Any, spec: Spec, act: Callable[[int], None]) -> None:
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


def attend(refs: PagedRefs, block: Block, ahead: Block, there: Any, side: Any, spec: Spec) -> None:
    """Starts the copies of the block ahead, if it is there, and takes the chunks of a block that its item attends.

    Where all of the block is attended, and the one ahead has its first page and no holes, the copies are started in
    between computations: each takes the scalar unit some four cycles, in which it has nothing else to do.
    """
    at_once = jnp.bool_(False)
    if spec.pieces:
        plain = _plain(block.item, block.number * spec.block, spec.chunk * spec.rounds, spec)
        at_once = plain & (ahead.item.holes == 0) & (ahead.pages(spec)[0] == 0)
    size = spec.chunk * (max(1, spec.rounds // 2) if spec.pieces else spec.rounds)
    base, item = block.number * spec.block, block.item
    first = jnp.clip(divide(item.low - base, size), 0, spec.block // size)
    end = jnp.clip(divide(item.high - base + size - 1, size), first, spec.block // size)

    @pl.when(there & jnp.logical_not(at_once))
    def _() -> None:
        copies.start_pages(refs, ahead, spec)

    copies.wait_pages(refs, block, (first * size, end * size), spec)

    if spec.pieces:
        pieces = copies.pieces(refs, ahead, there, spec.pieces, spec)
        pl.when(at_once)(lambda: _few(refs, block, side, _chunks(block, 0, spec.rounds, False, spec), pieces, spec))

    def some(k: jax.Array, carry: jax.Array) -> jax.Array:
        _take(refs, block, side, (pl.multiple_of(k * size, size), size // spec.chunk), spec)
        return carry

    loop(jnp.where(at_once, end, first), end, some, jnp.int32(0))


def _chunks(block: Block, start: Any, count: int, masked: bool, spec: Spec) -> list[Chunk]:
    """Chunks that are taken at once, from a key of the block on."""
    item, base = block.item, block.number * spec.block
    offsets = [pl.multiple_of(start + k * spec.chunk, spec.chunk) for k in range(count)]
    return [Chunk(block.slot, x, base + x, item.low, item.high, masked, spec.chunk) for x in offsets]


def _plain(item: Item, key: Any, size: int, spec: Spec) -> Any:
    """Whether all rows of an item attend as many keys from `key` on."""
    last, end = item.position + item.tokens - 1, key + size
    low = item.low if spec.left is None else jnp.maximum(item.low, last - spec.left)
    high = item.high if spec.right is None else jnp.minimum(item.high, item.position + spec.right + 1)
    return (key >= low) & (end <= high) & (item.holes == 0)


def _take(refs: PagedRefs, block: Block, side: Any, chunks: tuple[Any, int], spec: Spec) -> None:
    """Takes chunks, of which the first key and the number are given."""
    item, (start, count) = block.item, chunks
    plain = _plain(item, block.number * spec.block + start, count * spec.chunk, spec)

    def few(masked: bool) -> None:
        _few(refs, block, side, _chunks(block, start, count, masked, spec), iter(()), spec)

    if spec.rows == spec.few:
        if not spec.pieces:
            pl.when(plain)(lambda: few(False))
        pl.when(jnp.logical_not(plain & (not spec.pieces)))(lambda: few(True))
        return

    @pl.when(item.tokens * spec.group > spec.few)
    def _() -> None:
        _many(refs, block, side, start, spec)

    pl.when(item.tokens * spec.group <= spec.few)(lambda: few(True))


def _few(
    refs: PagedRefs, block: Block, side: Any, chunks: list[Chunk], between: Iterator[Callable[[], None]], spec: Spec
) -> None:
    """Few rows of all heads; after every slice of keys or values that is loaded, one of the actions of `between`."""
    rows = Rows(side, 0, spec.few, block.item.position)
    if chunks[0].masked and spec.tokens == 1:
        store_key_mask(refs, block.item, chunks, spec)
    found = [masks(refs, block.item, rows, at, n, spec) for n, at in enumerate(chunks)]
    heads = spec.kv_heads // turns(spec)

    def turn(k: Any) -> None:
        def loaded(at: Chunk, values: bool) -> list[jax.Array]:
            return load(refs.buffers, k, at, spec, values=values, between=lambda: next(between, _nothing)())

        def parts(at: Chunk, mask: Mask | None) -> list[Part]:
            keys, values = (functools.cache(partial(loaded, at, which)) for which in (False, True))
            return [Part(k * heads + n, rows, _one(keys, n), _one(values, n), mask) for n in range(heads)]

        pairs = zip(chunks, found, strict=True)
        lead = spec.masked_lead if chunks[0].masked else spec.lead
        update_softmax(refs, [part for at, mask in pairs for part in parts(at, mask)], lead, spec)
        for left in between:
            left()

    each(turns(spec), turn)


def _nothing() -> None:
    pass


def _one(loaded: Callable[[], list[jax.Array]], n: int) -> Callable[[], jax.Array]:
    """A head's of what is loaded for several when the first is asked for."""
    return lambda: loaded()[n]


def _many(refs: PagedRefs, block: Block, side: Any, start: Any, spec: Spec) -> None:
    """A tile's rows, a few heads after the other: keys and values are put next to each other first."""
    (chunk,) = _chunks(block, start, 1, True, spec)
    heads, item = spec.kv_heads // turns(spec), block.item

    def part(n: Any) -> None:
        offset = pl.multiple_of(n * spec.part, spec.part)
        at = chunk._replace(start=pl.multiple_of(start + offset, spec.part), key=chunk.key + offset, size=spec.part)

        def turn(k: Any) -> None:
            for target, values in ((refs.head_keys, False), (refs.head_values, True)):
                for head, rows in enumerate(load(refs.buffers, k, at, spec, values=values)):
                    target[k * heads + head] = rows

        @pl.when((at.key < item.high) & (at.key + at.size > item.low))
        def _() -> None:
            each(turns(spec), turn)
            # Of a tile with few tokens most rows of a large product would be for nothing.
            plain = _plain(item, at.key, at.size, spec) & (2 * item.tokens * spec.group > spec.row_block)
            for masked, wanted in ((False, plain), (True, jnp.logical_not(plain))):
                pl.when(wanted)(partial(_heads, refs, item, side, at._replace(masked=masked), spec))

    each(spec.chunk // spec.part, part)


def _heads(refs: PagedRefs, item: Item, side: Any, at: Chunk, spec: Spec) -> None:
    """Takes such keys, as many rows and heads at once as make a good product."""
    size, lead = (spec.row_chunk, HEADS - 1) if at.masked else (spec.row_block, 0)
    count = divide(item.tokens * spec.group + size - 1, size)
    together = next(n for n in (HEADS, 2, 1) if spec.kv_heads % n == 0)
    keys, values, get = refs.head_keys, refs.head_values, operator.getitem

    def some(k: Any) -> None:
        def part(n: jax.Array, carry: jax.Array) -> jax.Array:
            rows = Rows(side, pl.multiple_of(n * size, size), size, item.position)
            mask = masks(refs, item, rows, at, 0, spec)
            heads = [k * together + head for head in range(together)]
            update_softmax(
                refs, [Part(x, rows, partial(get, keys, x), partial(get, values, x), mask) for x in heads], lead, spec
            )
            return carry

        loop(jnp.int32(0), count, part, jnp.int32(0))

    each(spec.kv_heads // together, some)
