"""Assigns key blocks to programs of the paged kernel: the latent kernel's schedule, for tiles of query tokens.

An item is a tile of up to `tokens_per_tile` tokens of one sequence, so that in decoding it has one token, and in
prefill it fills the 64 rows of an instruction. The blocks of 128 keys of all items are concatenated, and programs have
equal shares of them; lengths are read on the device.
"""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.pages import QueryTiles
from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.hopper.split_boundaries import SplitBoundaries
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP


def make_schedule(
    record: PagedAttention,
    tiles: QueryTiles,
    num_programs: int,
    gathered_tokens_per_tile: int = 0,
    keys_per_step: int = KEYS_PER_STEP,
    splits: SplitBoundaries | None = None,
    cuts_items: bool = True,
) -> LatentSchedule:
    """Returns the items of a record, with two more columns, the first token's position and its query row; and the
    shares.

    Args:
        record: The canonical arguments.
        tiles: Tiles of query tokens.
        num_programs: Programs that share the steps.
        gathered_tokens_per_tile: Query rows per tile if they are gathered; 0 if they are in the record's order.
        keys_per_step: Keys per step, counted from key 0: a share has whole steps.
        splits: Boundaries in steps: a share has whole splits; None for splits of one step.
        cuts_items: Whether a share may begin within an item.
    """
    sequence_of_row, kv_lens = tiles.sequence, record.kv_lens.astype(I32)
    keys = jnp.minimum(kv_lens[sequence_of_row], paged_cache.max_sequence_len(record))
    left, right = causal_window_bounds(record)
    if right is not None:
        # The band of a tile: from the first key of its first token to the last key of its last. The kernel masks keys
        # that single tokens do not attend to.
        keys = jnp.minimum(keys, tiles.position + tiles.rows + right)
    low = jnp.zeros_like(keys) if record.kv_starts is None else record.kv_starts.astype(I32)[sequence_of_row]
    if left is not None:
        low = jnp.maximum(low, tiles.position - left)
    low = jnp.maximum(low, 0)
    keys = jnp.where((tiles.rows > 0) & (keys > low), keys, 0)
    low = jnp.where(keys > 0, low, 0)
    # As in the latent kernel's plan: steps start at multiples of their keys, and programs get equal shares of them.
    steps = jnp.maximum(cdiv(keys, keys_per_step) - low // keys_per_step, 1)  # an item without keys has an output, too
    # Tiles past the last one have no tokens, and no program processes them.
    steps = jnp.where(jnp.arange(steps.shape[0]) < tiles.total, steps, 0)
    ends = jnp.cumsum(steps, dtype=I32)
    total = ends[-1]
    begin = jnp.minimum(jnp.arange(num_programs + 1, dtype=I32) * cdiv(total, num_programs), total)
    if not cuts_items:  # a program has the items that begin in its share
        starts = ends - steps
        begin = jnp.min(jnp.where((starts >= begin[:, None]) & (steps > 0), starts, total), axis=1)
    begin = _round_up_to_splits(begin, splits if cuts_items else None, steps, ends, low // keys_per_step)
    item = jnp.sum(ends <= begin[:, None], axis=1, dtype=I32)
    # Tokens of the batch before this tile's first.
    row = paged_cache.query_ranges(record)[0][sequence_of_row] + tiles.row_offset
    if gathered_tokens_per_tile:
        row = jnp.arange(sequence_of_row.shape[0], dtype=I32) * gathered_tokens_per_tile
    items = jnp.stack((sequence_of_row, keys, ends - steps, steps, low, tiles.position, row), axis=1)
    return LatentSchedule(items, jnp.stack((jnp.minimum(item, len(sequence_of_row) - 1), begin), axis=1))


def _round_up_to_splits(
    begin: jax.Array, splits: SplitBoundaries | None, steps: jax.Array, ends: jax.Array, first_steps: jax.Array
) -> jax.Array:
    """Returns the first steps of shares, in the order of all steps, moved to the next boundary of a split.

    Args:
        begin: The first steps.
        splits: Boundaries in the steps of a sequence; None to move nothing.
        steps: Steps of every item.
        ends: The step after an item's last one, in the order of all steps.
        first_steps: An item's first step in its sequence.
    """
    if splits is None or not splits.doublings:
        return begin
    item = jnp.minimum(jnp.sum(ends <= begin[:, None], axis=1, dtype=I32), len(ends) - 1)
    start, first = (ends - steps)[item], first_steps[item]
    next_split = splits.index(jnp.maximum(begin - start + first - 1, 0)) + 1
    moved = jnp.minimum(start + splits.first_unit(next_split) - first, ends[item])
    return jnp.where(begin > start, moved, begin)
