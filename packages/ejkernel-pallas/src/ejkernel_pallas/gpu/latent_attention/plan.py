"""Which key blocks each program works on.

A query row is an item: its heads attend the same keys. The steps of all items, `UNIT` keys each, lie in a line, of
which all programs have equal shares, so that no length sets the time; lengths are read on the device.

    items     |  0  |     1     |2|       3       |
    programs  |    0    |    1    |    2    |    3 |      items 1 and 3 are cut: each program writes its part

A program has at most two parts of items: of the item in which it begins, and of that in which it ends. Where all items
are as long, shares may grow by a few percent so that none is cut, and nothing has to be merged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.latent_attention.spec import UNIT, LatentSpec

FEW_ITEMS = 1024
"""Items that `plan_kernel.planned` plans in one kernel, each block of which has all of them in shared memory."""


class LatentSchedule(NamedTuple):
    """Items and shares, int32.

    Attributes:
        items: [T, 5]: sequence, one more than the last key, first step in the line, steps, first key.
        shares: [P + 1, 2]: the item in which a program begins, and its first step; last the end of the line, twice.
    """

    items: jax.Array
    shares: jax.Array


class Extents(NamedTuple):
    """What an item attends, [T] int32.

    Attributes:
        owner: Sequence.
        keys: One more than the last key; 0 where there is none.
        low: First key.
    """

    owner: jax.Array
    keys: jax.Array
    low: jax.Array


def make_extents(record: PagedAttention, spec: LatentSpec) -> Extents:
    """Returns what the items of a record attend."""
    lens, starts = record.kv_lens.astype(jnp.int32), record.kv_starts
    if record.query_start is None:
        # A row a sequence: nothing is gathered, which would be a kernel of its own.
        sequence, position = jnp.arange(spec.rows, dtype=jnp.int32), lens - 1
        owner = sequence
    else:
        sequence, position = paged_cache.token_places(record)
        owner = jnp.maximum(sequence, 0)
        lens, starts = lens[owner], None if starts is None else starts[owner]
    keys, low = limits(record, lens, position, 0 if starts is None else starts.astype(jnp.int32))
    keys = jnp.where(sequence >= 0, keys, 0)
    return Extents(owner, keys, jnp.where(keys > 0, low, 0))


def limits(record: PagedAttention, lens: Any, position: Any, starts: Any) -> tuple[Any, Any]:
    """Keys and first key of rows at positions of sequences, 0 and 0 where there is none. The record gives constants."""
    keys = jnp.minimum(lens, paged_cache.capacity(record))
    left, right = band(record)
    if right is not None:
        keys = jnp.minimum(keys, position + 1 + right)
    # A window that reaches before key 0 has a negative start.
    low = jnp.maximum(starts, 0)
    if left is not None:
        low = jnp.maximum(low, position - left)
    keys = jnp.where(keys > low, keys, 0)
    return keys, jnp.where(keys > 0, low, 0)


def make_plan(record: PagedAttention, spec: LatentSpec) -> LatentSchedule:
    """Returns the items of a record, and the programs' shares."""
    owner, keys, low = make_extents(record, spec)
    # Steps begin at multiples of UNIT, so that a block lies inside one page or is made of whole pages. Keys before
    # `low` are masked.
    steps = jnp.maximum(cdiv(keys, UNIT) - low // UNIT, 1)  # an item without keys has an output, too
    ends = jnp.cumsum(steps, dtype=jnp.int32)
    total = ends[-1]
    # Lengths are arrays, so shares follow them without a new compilation.
    share = cdiv(total, spec.programs)
    if spec.growth:
        share = _whole(share, steps, spec.growth)
    begin = jnp.minimum(jnp.arange(spec.programs + 1, dtype=jnp.int32) * share, total)
    # The items that end before a share begins: comparisons that XLA fuses into one reduction, instead of a search.
    item = jnp.sum(ends <= begin[:, None], axis=1, dtype=jnp.int32)
    items = jnp.stack((owner, keys, ends - steps, steps, low), axis=1)
    # Programs that begin at the end of the line have no steps; their item only has to be one that exists.
    return LatentSchedule(items, jnp.stack((jnp.minimum(item, spec.rows - 1), begin), axis=1))


def _whole(share: jax.Array, steps: jax.Array, growth: int) -> jax.Array:
    """The share that has whole items alone, if all items are as long and it is at most `growth` percent larger."""
    longest = jnp.max(steps)
    whole = cdiv(share, longest) * longest
    return jnp.where((jnp.min(steps) == longest) & ((whole - share) * 100 <= share * growth), whole, share)
