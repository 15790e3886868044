"""The list of what is to be computed: one item for every tile of query rows of one sequence.

It is made on the device from lengths that may be traced, and has a fixed size: q tokens of n sequences have at most
`q // tile + n` tiles that are not empty. The kernel reads it from scalar memory, a field after the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.planning import paged_cache
from ejkernel_pallas.tpu.paged_attention.spec import Spec

FIELDS = (
    "sequence", "row", "tokens", "position", "low", "high", "first_page", "end_page", "first_block", "end_block",
    "holes", "token", "fresh",
)  # fmt: skip


class Work(NamedTuple):
    """What the kernel is told, and what undoes the order in which it has its rows.

    Attributes:
        items: int32 [fields * W]. Of each item: its sequence; its first row of the packed queries; its tokens; the
            position of the first; the first key that any of its rows attends, and one more than the last; the same of
            pages and of blocks, of which there is one at least; whether a page between them is absent; and the
            sequence's first token and number of tokens that are to be written, 0 but in its first item.
        spans: int32 [parts + 1], the items of each part.
        tables: int32 [N * entries + pages of a block], pages; -1 for absent ones.
        tokens: int32 [Tp], of the packed queries; T for none.
        places: int32 [T], where a token is among them; 0 for those of no sequence.
        owned: bool [T], whether a token is a sequence's.
        item: int32 [T], of a token.
        offset: int32 [T], of a token in its item.
    """

    items: jax.Array
    spans: jax.Array
    tables: jax.Array
    tokens: jax.Array
    places: jax.Array
    owned: jax.Array
    item: jax.Array
    offset: jax.Array


def find_work(record: PagedAttention, spec: Spec) -> Work:
    """The work of a record."""
    starts, lengths = paged_cache.query_ranges(record)
    first_item, total, sequence, skipped, tokens, position = paged_cache.query_tiles(record, spec.tokens)
    padded = -(-lengths // spec.step) * spec.step
    base = jnp.cumsum(padded, dtype=jnp.int32) - padded
    low, high = _reach(record, spec, sequence, position, tokens)
    tables = _tables(record)
    first = (skipped == 0) & (tokens > 0)
    fields = {
        "sequence": sequence,
        "row": (base[sequence] + skipped) * spec.group,
        "tokens": tokens,
        "position": position,
        "low": low,
        "high": high,
        "first_page": low // spec.cache.slots,
        "end_page": -(-high // spec.cache.slots),
        "first_block": low // spec.block,
        "end_block": jnp.maximum(-(-high // spec.block), low // spec.block + 1),
        "holes": _holes(tables, spec, sequence, low, high),
        "token": starts[sequence],
        "fresh": jnp.where(first, lengths[sequence], 0),
    }
    owner, _ = paged_cache.token_places(record)
    inside = jnp.arange(owner.shape[0], dtype=jnp.int32) - starts[owner]
    return Work(
        items=jnp.concatenate([fields[name].astype(jnp.int32) for name in FIELDS]),
        spans=_spans(spec, first, jnp.where(tokens > 0, high - low + spec.chunk, 0), total),
        # Pages are looked up several at once, and the last sequence's need not fill its last block.
        tables=jnp.pad(tables.reshape(-1), (0, spec.pages), constant_values=-1),
        tokens=_packed(record, spec, base + padded, starts - base, base + lengths),
        places=jnp.where(owner >= 0, base[owner] + inside, 0),
        owned=owner >= 0,
        item=jnp.where(owner >= 0, first_item[owner] + inside // spec.tokens, 0),
        offset=jnp.where(owner >= 0, inside % spec.tokens, 0),
    )


def _reach(
    record: PagedAttention, spec: Spec, sequence: jax.Array, position: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First key and one more than the last key of tiles of `tokens` rows from `position` on."""
    low = jnp.zeros_like(position) if record.kv_starts is None else record.kv_starts.astype(jnp.int32)[sequence]
    high = jnp.minimum(record.kv_lens.astype(jnp.int32)[sequence], paged_cache.capacity(record))
    if spec.left is not None:
        low = jnp.maximum(low, position - spec.left)
    if spec.right is not None:
        high = jnp.minimum(high, position + tokens + spec.right)
    low = jnp.maximum(low, 0)
    return low, jnp.where(tokens > 0, jnp.maximum(high, low), low)


def _tables(record: PagedAttention) -> jax.Array:
    """int32 [N, entries], -1 for what is no page of the cache."""
    if record.block_tables is None:
        return jnp.arange(record.kv_lens.shape[0], dtype=jnp.int32)[:, None]
    tables = record.block_tables.astype(jnp.int32)
    return jnp.where((tables >= 0) & (tables < paged_cache.page_count(record)), tables, -1)


def _holes(tables: jax.Array, spec: Spec, sequence: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Whether a page between two keys is absent."""
    absent = jnp.cumsum(jnp.pad(tables < 0, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    first, end = low // spec.cache.slots, -(-high // spec.cache.slots)
    return (absent[sequence, end] - absent[sequence, jnp.minimum(first, end)]) > 0


def _spans(spec: Spec, first: jax.Array, cost: jax.Array, live: jax.Array) -> jax.Array:
    """Where each part of the work begins: where a sequence does, as close to the same cost for all as that allows."""
    before = jnp.cumsum(cost) - cost
    entry = jnp.arange(cost.shape[0], dtype=jnp.int32)
    share = jnp.sum(cost) / spec.parts
    begins = [
        jnp.min(jnp.where(first & (before >= part * share), entry, live), initial=live) for part in range(1, spec.parts)
    ]
    return jnp.stack([jnp.int32(0), *(x.astype(jnp.int32) for x in begins), live])


def _packed(record: PagedAttention, spec: Spec, ends: jax.Array, shift: jax.Array, filled: jax.Array) -> jax.Array:
    """The token of every place of the packed queries; T for none."""
    total, sequences = record.query.shape[0], ends.shape[0]
    bound = sequences * spec.step if record.query_start is None else total + sequences * (spec.step - 1)
    place = jnp.arange(-(-bound // spec.step) * spec.step, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, place, side="right"), sequences - 1)
    return jnp.where(place < filled[sequence], place + shift[sequence], total)
