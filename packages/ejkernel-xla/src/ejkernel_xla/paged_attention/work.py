"""The list of what is to be computed: one entry for every tile of query rows of one sequence.

It is made on the device from lengths that may be traced, and has a fixed size: q rows of n sequences have at most
`q // block + n` tiles of `block` rows that are not empty.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.planning import paged_cache
from ejkernel_xla.paged_attention.tiles import Tiles


class Work(NamedTuple):
    """Tiles, those with most keys first, so that tiles worked on together end together. All int32.

    Attributes:
        live: [], how many entries are real.
        sequence: [W].
        row: [W], the tile's first row of the record's queries.
        rows: [W], how many rows it has; 0 for entries that are not real.
        position: [W], of its first row.
        context: [W], tokens of the sequence before its queries.
        low: [W], the first key any of its rows attends.
        high: [W], one more than the last.
    """

    live: jax.Array
    sequence: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    context: jax.Array
    low: jax.Array
    high: jax.Array


def find_work(record: PagedAttention, tiles: Tiles) -> Work:
    """The tiles of a record; W is a multiple of `tiles.stack`."""
    starts, _ = paged_cache.query_ranges(record)
    _, _, sequence, skipped, rows, position = paged_cache.query_tiles(record, tiles.queries, tiles.stack)
    low, high = _reach(record, sequence, position, rows)
    # Entries that are not real come last, after tiles without keys, whose rows still have an output.
    order = jnp.argsort(jnp.where(rows > 0, low - high, 1), stable=True)
    fields = (sequence, starts[sequence] + skipped, rows, position, position - skipped, low, high)
    return Work(jnp.sum(rows > 0, dtype=jnp.int32), *(x[order] for x in fields))


def take(work: Work, batch: jax.Array, stack: int) -> Work:
    """The entries of one batch, `stack` of them."""
    parts = (jax.lax.dynamic_slice(x, (batch * stack,), (stack,)) for x in work[1:])
    return Work(work.live, *parts)


def _reach(
    record: PagedAttention, sequence: jax.Array, position: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First key and one more than the last key of tiles of `rows` rows from `position` on."""
    left, right = band(record)
    low = jnp.zeros_like(position) if record.kv_starts is None else record.kv_starts.astype(jnp.int32)[sequence]
    high = jnp.minimum(record.kv_lens.astype(jnp.int32)[sequence], paged_cache.capacity(record))
    if left is not None:
        low = jnp.maximum(low, position - left)
    if right is not None:
        high = jnp.minimum(high, position + rows + right)
    low = jnp.maximum(low, 0)
    return low, jnp.where(rows > 0, jnp.maximum(high, low), low)
