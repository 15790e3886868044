"""Which key blocks each program works on.

A query row is an item: its heads attend the same keys. The steps of all items, `UNIT` keys each, lie in a line, of
which all programs have equal shares, so that no length sets the time; lengths are read on the device.

    items     |  0  |     1     |2|       3       |
    programs  |    0    |    1    |    2    |    3 |      items 1 and 3 are cut: each program writes its part

A program has at most two parts of items: of the item in which it begins, and of that in which it ends. Where all items
are as long, shares may grow by a few percent so that none is cut, and nothing has to be merged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.planning import paged_cache
from ejkernel_pallas.gpu.latent_attention.spec import UNIT, LatentSpec

FEW_ITEMS = 1024
"""Items whose running sums are made by comparing all pairs: one kernel of XLA, where a scan is several."""


class LatentSchedule(NamedTuple):
    """Items and shares, int32.

    Attributes:
        items: [T, 5]: sequence, one more than the last key, first step in the line, steps, first key.
        shares: [P + 1, 2]: the item in which a program begins, and its first step; last the end of the line, twice.
    """

    items: jax.Array
    shares: jax.Array


def make_plan(record: PagedAttention, spec: LatentSpec) -> LatentSchedule:
    """The items of a record, and the programs' shares."""
    if record.query_start is None:
        sequence, position = jnp.arange(spec.rows, dtype=jnp.int32), record.kv_lens.astype(jnp.int32) - 1
    else:
        sequence, position = paged_cache.token_places(record)
    owner = jnp.maximum(sequence, 0)
    keys = jnp.minimum(record.kv_lens.astype(jnp.int32)[owner], paged_cache.capacity(record))
    left, right = band(record)
    if right is not None:
        keys = jnp.minimum(keys, position + 1 + right)
    low = jnp.zeros_like(keys) if record.kv_starts is None else record.kv_starts.astype(jnp.int32)[owner]
    if left is not None:
        low = jnp.maximum(low, position - left)
    # A window that reaches before key 0 has a negative start.
    low = jnp.maximum(low, 0)
    keys = jnp.where((sequence >= 0) & (keys > low), keys, 0)
    low = jnp.where(keys > 0, low, 0)
    # Steps begin at multiples of UNIT, so that a block lies inside one page or is made of whole pages. Keys before
    # `low` are masked.
    steps = jnp.maximum(-(-keys // UNIT) - low // UNIT, 1)  # an item without keys has an output, too
    ends = _sums(steps)
    total = ends[-1]
    # Lengths are arrays, so shares follow them without a new compilation.
    share = -(-total // spec.programs)
    if spec.growth:
        share = _whole(share, steps, spec.growth)
    begin = jnp.minimum(jnp.arange(spec.programs + 1, dtype=jnp.int32) * share, total)
    # The items that end before a share begins: comparisons that XLA fuses into one reduction, instead of a search.
    item = jnp.sum(ends <= begin[:, None], axis=1, dtype=jnp.int32)
    items = jnp.stack((owner, keys, ends - steps, steps, low), axis=1)
    # Programs that begin at the end of the line have no steps; their item only has to be one that exists.
    return LatentSchedule(items, jnp.stack((jnp.minimum(item, spec.rows - 1), begin), axis=1))


def _sums(steps: jax.Array) -> jax.Array:
    """Running sums."""
    if steps.shape[0] > FEW_ITEMS:
        return jnp.cumsum(steps, dtype=jnp.int32)
    item = jnp.arange(steps.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(item <= item[:, None], steps, 0), axis=1, dtype=jnp.int32)


def _whole(share: jax.Array, steps: jax.Array, growth: int) -> jax.Array:
    """The share that has whole items alone, if all items are as long and it is at most `growth` percent larger."""
    longest = jnp.max(steps)
    whole = -(-share // longest) * longest
    return jnp.where((jnp.min(steps) == longest) & ((whole - share) * 100 <= share * growth), whole, share)
