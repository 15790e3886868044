"""The selective scan with its tokens split over devices: the summaries of a shard.

The step sizes after a token are all that acts on what it writes: the state that a shard adds is one sum over tokens,
weighted by `exp(A * steps after)`, which XLA computes without an array of tokens times states.
"""

import jax
import jax.numpy as jnp

from ejkernel.families import split_recurrence
from ejkernel.families.selective_scan.record import SelectiveScan, accumulator, first_state
from ejkernel.families.selective_scan.scan_sequences import with_plain_states
from ejkernel.families.split_recurrence import BorderTokens, Run, ShardSummary, SplitRecurrence, cumulative_sums
from ejkernel.planning import slots
from ejkernel.planning.token_shards import TokenShards, packed_borders


def run_on_token_shard(run: Run, record: SelectiveScan, shards: TokenShards) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a device's tokens and the final states of the call.

    Args:
        run: Computes the record of one device.
        record: The record of this device's tokens.
        shards: How tokens are split.
    """
    held, indices, starts = record.initial_state, record.state_slots, record.cu_seqlens
    read, final = split_recurrence.run_on_token_shard(
        SPLIT_RECURRENCE_FUNCTIONS, run, with_plain_states(record), shards
    )
    if held is None or indices is None or starts is None:
        return read, final
    return read, slots.write_slots(held, indices, starts, final)


def record_for_explain(record: SelectiveScan) -> SelectiveScan:
    """Returns a device's record with the shapes that its kernel gets, for `explain`; its states have other values."""
    return split_recurrence.with_initial_states(SPLIT_RECURRENCE_FUNCTIONS, with_plain_states(record))


def borders(record: SelectiveScan, shards: TokenShards) -> BorderTokens:
    """Returns the tokens of a shard that its borders concern."""
    if record.cu_seqlens is not None:
        return split_recurrence.packed_border_tokens(packed_borders(record.cu_seqlens, shards), shards)
    every = jnp.ones(record.x.shape[:2], bool)
    return BorderTokens(every, every, every[:, 0])


def summary(run: Run, record: SelectiveScan, borders: BorderTokens) -> ShardSummary:
    """Returns the summary of a shard."""
    steps = _chosen_steps(record, borders.trailing)
    later = cumulative_sums(jnp.pad(steps[:, 1:], ((0, 0), (0, 1), (0, 0))), reverse=True)
    values, write_or_read = (_zero_unless_chosen(x, borders.trailing, record) for x in (record.x, record.write))
    added = _sum_weighted_by_write_or_read(record, later, steps * values, write_or_read)
    packed = borders.packed
    if packed is not None and record.initial_state is not None:
        # The sequence that goes on may have begun here, with a state of its own.
        begun = states(record)[packed.run][None] * _state_decay_factor(record, steps)
        added = added + jnp.where(packed.passes & ~borders.spans_shard[0], begun, 0)
    return ShardSummary(_state_decay_factor(record, steps), added)


def gradient(
    run: Run,
    record: SelectiveScan,
    borders: BorderTokens,
    output_cotangent: jax.Array,
    ended_state_cotangent: jax.Array | None,
) -> jax.Array:
    """Returns the gradient of the state that enters a shard, where that of the state that leaves is zeros, and that of
    the state after the leading tokens is `ended_state_cotangent`.
    """
    steps = _chosen_steps(record, borders.leading)
    values, write_or_read = (_zero_unless_chosen(x, borders.leading, record) for x in (output_cotangent, record.read))
    added = _sum_weighted_by_write_or_read(record, cumulative_sums(steps), values, write_or_read)
    if ended_state_cotangent is None:
        return added
    return added + _state_decay_factor(record, steps) * ended_state_cotangent


def states(record: SelectiveScan) -> jax.Array:
    """Returns the initial states, [B, I, E] or [N, I, E], in the accumulator's dtype."""
    return jnp.swapaxes(first_state(record), 1, 2)


def _chosen_steps(record: SelectiveScan, chosen: jax.Array) -> jax.Array:
    return _zero_unless_chosen(record.step, chosen, record)


def _zero_unless_chosen(x: jax.Array, chosen: jax.Array, record: SelectiveScan) -> jax.Array:
    """Returns x of chosen tokens [B, T, ...] in the accumulator's dtype, and 0 for others."""
    return jnp.where(chosen[..., None], x.astype(accumulator(record)), 0)


def _state_decay_factor(record: SelectiveScan, steps: jax.Array) -> jax.Array:
    """Returns the factor of all steps on a state, [B, I, E]."""
    return jnp.exp(jnp.sum(steps, axis=1)[..., None] * record.decay.astype(accumulator(record)))


def _sum_weighted_by_write_or_read(
    record: SelectiveScan, steps: jax.Array, values: jax.Array, write_or_read: jax.Array
) -> jax.Array:
    """Returns the sum over tokens of `exp(decay * steps) * values * write_or_read`, [B, I, E].

    Args:
        record: The record.
        steps: [B, T, I], the step sizes that weight each token.
        values: [B, T, I], 0 for tokens that do not count.
        write_or_read: [B, T, E], the record's `write` or `read`, 0 for the same tokens.
    """
    weights = jnp.exp(steps[..., None] * record.decay.astype(accumulator(record)))
    return jnp.sum(weights * values[..., None] * write_or_read[:, :, None], axis=1)


SPLIT_RECURRENCE_FUNCTIONS = SplitRecurrence(
    borders=borders,
    summary=summary,
    gradient=gradient,
    matrices=lambda record: False,
    states=states,
    name=lambda record: "initial_state",
)
"""The selective scan's functions for a recurrence whose tokens are split over devices."""
