"""Assigns key blocks to programs.

A query row is an item: its heads attend to the same keys. The steps of all items, `KEYS_PER_STEP` keys each, are
concatenated, and all programs have equal shares of them, so that no single length determines the time; lengths are read
on the device.

    items     |  0  |     1     |2|       3       |
    programs  |    0    |    1    |    2    |    3 |      items 1 and 3 are split: each program writes a partial result

A program has at most two partial results: of the item in which its share starts, and of the one in which it ends. If
all items have equal lengths, shares may grow by a few percent so that none is split, and nothing has to be merged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, LatentSpec

MAX_ITEMS_PLANNED_IN_KERNEL = 1024
"""The largest number of items that `schedule.make_schedule_in_kernel` plans in one kernel, each block of which has all
in shared memory.
"""


class LatentSchedule(NamedTuple):
    """Items and shares, int32.

    Attributes:
        items: [T, 5]: sequence, end of its keys, first step in the order of all steps, number of steps, first key.
        program_starts: [P + 1, 2]: the item in which a program starts, and its first step; last the total of steps,
            twice.
    """

    items: jax.Array
    program_starts: jax.Array


class RowKeyExtents(NamedTuple):
    """The keys that an item attends to, [T] int32.

    Attributes:
        sequence_of_row: Sequence.
        key_end: The key after the last one; 0 if there is none.
        first_key: First key.
    """

    sequence_of_row: jax.Array
    key_end: jax.Array
    first_key: jax.Array


def make_row_key_extents(record: PagedAttention, spec: LatentSpec) -> RowKeyExtents:
    """Returns the keys of the items of a record."""
    kv_lens, kv_starts = record.kv_lens.astype(jnp.int32), record.kv_starts
    if record.query_start is None:
        # One row per sequence: nothing is gathered, which would be a separate kernel.
        sequence, position = jnp.arange(spec.num_items, dtype=jnp.int32), kv_lens - 1
        sequence_of_row = sequence
    else:
        sequence, position = paged_cache.token_sequences_and_positions(record)
        sequence_of_row = jnp.maximum(sequence, 0)
        kv_lens, kv_starts = kv_lens[sequence_of_row], None if kv_starts is None else kv_starts[sequence_of_row]
    keys, low = key_limits(record, kv_lens, position, 0 if kv_starts is None else kv_starts.astype(jnp.int32))
    keys = jnp.where(sequence >= 0, keys, 0)
    return RowKeyExtents(sequence_of_row, keys, jnp.where(keys > 0, low, 0))


def key_limits(record: PagedAttention, kv_lens: Any, position: Any, kv_starts: Any) -> tuple[Any, Any]:
    """Returns end and start of the keys of rows at positions of sequences, 0 and 0 without keys; `record` has
    constants.
    """
    keys = jnp.minimum(kv_lens, paged_cache.max_sequence_len(record))
    left, right = causal_window_bounds(record)
    if right is not None:
        keys = jnp.minimum(keys, position + 1 + right)
    # A window that extends before key 0 has a negative start.
    low = jnp.maximum(kv_starts, 0)
    if left is not None:
        low = jnp.maximum(low, position - left)
    keys = jnp.where(keys > low, keys, 0)
    return keys, jnp.where(keys > 0, low, 0)


def make_schedule(record: PagedAttention, spec: LatentSpec) -> LatentSchedule:
    """Returns the items of a record, and the programs' shares."""
    sequence_of_row, keys, low = make_row_key_extents(record, spec)
    # Steps start at multiples of KEYS_PER_STEP, so that a block is inside one page or consists of whole pages. Keys
    # before `low` are masked.
    steps = jnp.maximum(cdiv(keys, KEYS_PER_STEP) - low // KEYS_PER_STEP, 1)  # an item without keys has an output, too
    ends = jnp.cumsum(steps, dtype=jnp.int32)
    total = ends[-1]
    # Lengths are arrays, so shares depend on them without recompilation.
    steps_per_program = cdiv(total, spec.num_programs)
    if spec.max_share_growth_percent:
        steps_per_program = _grow_to_whole_items(steps_per_program, steps, spec.max_share_growth_percent)
    begin = jnp.minimum(jnp.arange(spec.num_programs + 1, dtype=jnp.int32) * steps_per_program, total)
    # Counts the items that end before a share starts: comparisons that XLA fuses into one reduction, instead of a
    # search.
    item = jnp.sum(ends <= begin[:, None], axis=1, dtype=jnp.int32)
    items = jnp.stack((sequence_of_row, keys, ends - steps, steps, low), axis=1)
    # Programs past the last step have none; their item only has to be valid.
    return LatentSchedule(items, jnp.stack((jnp.minimum(item, spec.num_items - 1), begin), axis=1))


def _grow_to_whole_items(
    steps_per_program: jax.Array, steps_per_item: jax.Array, max_share_growth_percent: int
) -> jax.Array:
    """Returns the share that consists of whole items, if all items have equal lengths and it is at most
    `max_share_growth_percent` percent larger.
    """
    max_steps = jnp.max(steps_per_item)
    whole_item_steps = cdiv(steps_per_program, max_steps) * max_steps
    return jnp.where(
        (jnp.min(steps_per_item) == max_steps)
        & ((whole_item_steps - steps_per_program) * 100 <= steps_per_program * max_share_growth_percent),
        whole_item_steps,
        steps_per_program,
    )
