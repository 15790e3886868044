"""The kernel: items of the list of work, one after another, and the blocks of keys of each (Kwon et al. 2023).

    block n computes      copies on their way
    -----------------     -----------------------------------------------------------------------------
    item i, block n       pages of blocks n+1 and n+2, of this item or the next   keys_buffer[3 slots]
                          queries of item i+1                                     query_buffer[2]
                          output and lse of item i-1                              output_buffer[2], lse_buffer[2]
                          new tokens of item i+2, into their pages                awaited in item i's last block

Pages are found in the table in scalar memory; pages that no row attends are not copied. New tokens have to be in their
pages before a copy of these starts. The first block with which pages of item i+2 may be copied is the last of item i,
so the tokens are awaited there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.loops import each, loop
from ejkernel_pallas.tpu.paged_attention import copies
from ejkernel_pallas.tpu.paged_attention.blocks import attend, by_size
from ejkernel_pallas.tpu.paged_attention.copies import Block, Cursor, Item
from ejkernel_pallas.tpu.paged_attention.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.softmax import Rows, begin, finish
from ejkernel_pallas.tpu.paged_attention.spec import AHEAD, Spec


def kernel(refs: PagedRefs, *, spec: Spec) -> None:
    """One part of the work."""
    part = pl.program_id(0)
    first, end = refs.spans[part], refs.spans[part + 1]

    @pl.when(first < end)
    def _() -> None:
        item = Item(refs.items, first)
        if refs.write_counts is not None:
            loop(first, jnp.minimum(first + AHEAD, end), partial(_write, refs, spec), jnp.int32(0))

        def ahead(slot: Any, cursor: Cursor) -> Cursor:
            block = _block_at(refs, cursor, slot, end)
            pl.when(cursor.index < end)(lambda: copies.start_pages(refs, block, spec))
            pl.when(slot == 0)(lambda: copies.queries(refs, item, 0, spec, wait=False))
            return cursor.after(refs.items, end)

        cursor = loop(jnp.int32(0), AHEAD, ahead, Cursor(first, item.first_block))
        loop(first, end, lambda k, state: _item(refs, k, first, end, state, spec), (jnp.int32(0), cursor))

        def left(k: jax.Array, carry: jax.Array) -> jax.Array:
            copies.results(refs, Item(refs.items, k), (k - first) % 2, spec, wait=True)
            return carry

        loop(jnp.maximum(first, end - 2), end, left, jnp.int32(0))


def _write(refs: PagedRefs, spec: Spec, index: Any, carry: Any) -> Any:
    """Writes an item's new tokens."""
    copies.start_writes(refs, Item(refs.items, index), spec)
    copies.wait_writes(refs, spec)
    return carry


def _block_at(refs: PagedRefs, cursor: Cursor, slot: Any, end: Any) -> Block:
    return Block(Item(refs.items, jnp.minimum(cursor.index, end - 1)), cursor.number, slot)


def _item(
    refs: PagedRefs, index: Any, first: Any, end: Any, state: tuple[Any, Cursor], spec: Spec
) -> tuple[Any, Cursor]:
    """Computes an item. The state is the buffer of its first block, and the next block to copy."""
    item, side = Item(refs.items, index), (index - first) % 2

    @pl.when(index + 1 < end)
    def _() -> None:
        copies.queries(refs, Item(refs.items, index + 1), 1 - side, spec, wait=False)

    # Those of the last item whose first block may be copied while this item is computed.
    writes = (index + AHEAD < end) if refs.write_counts is not None else None
    if writes is not None:
        pl.when(writes)(lambda: copies.start_writes(refs, Item(refs.items, index + AHEAD), spec))
    small = item.tokens * spec.group <= spec.few
    by_size(small, spec, lambda count: each(spec.kv_heads, lambda head: begin(refs, head, count)))
    copies.queries(refs, item, side, spec, wait=True)

    @pl.when(index - first >= 2)
    def _() -> None:
        copies.results(refs, Item(refs.items, index - 2), side, spec, wait=True)

    start, count = item.first_block, item.end_block - item.first_block

    def block(k: jax.Array, state: tuple[Any, Cursor]) -> tuple[Any, Cursor]:
        slot, cursor = state
        if writes is not None:
            pl.when(writes & (k + 1 == count))(lambda: copies.wait_writes(refs, spec))
        ahead = _block_at(refs, cursor, jnp.where(slot == 0, AHEAD, slot - 1), end)
        following = jnp.where(slot == AHEAD, 0, slot + 1), cursor.after(refs.items, end)
        attend(refs, Block(item, start + k, slot), ahead, cursor.index < end, side, spec)
        return following

    state = loop(jnp.int32(0), count, block, state)

    by_size(small, spec, lambda count: _finish(refs, item, side, count, spec))
    copies.results(refs, item, side, spec, wait=False)
    return state


def _finish(refs: PagedRefs, item: Item, side: Any, count: int, spec: Spec) -> None:
    def head(k: Any) -> None:
        for start in range(0, count, 128):
            finish(refs, k, Rows(side, start, min(128, count - start), item.position), spec)

    each(spec.kv_heads, head)
