"""The linear recurrence with its tokens split over devices: the summaries of a shard.

Without a delta rule, gates alone act on a state: the factor of a shard is the product of its gates, and the state that
it adds is one product of keys and values, each weighted by the gates after it. With a delta rule or a low-rank term the
factor is a matrix for each head, and the kernel itself computes both: from zeros the state that is added, and from the
identity, with values of zero, the matrix. The outputs of that second call are what a state that enters adds to the
outputs: without gradients no third call is needed, and no second one in the backward pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families import split_recurrence
from ejkernel.families.linear_recurrence.record import (
    LinearRecurrence,
    accumulator,
    has_matrix_transition,
    num_state_heads,
    real_and_segment_start_tokens,
    states,
    to_recorded_state_layout,
    with_plain_states,
)
from ejkernel.families.split_recurrence import (
    BorderTokens,
    Results,
    Run,
    ShardSummary,
    SplitRecurrence,
    cumulative_sums,
)
from ejkernel.planning.precision import product_precision
from ejkernel.planning.token_shards import TokenShards, packed_borders


def run_on_token_shard(run: Run, record: LinearRecurrence, shards: TokenShards) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a device's tokens and the final states of the call.

    Args:
        run: Computes the record of one device.
        record: The record of this device's tokens.
        shards: How tokens are split.
    """
    _check_no_trees(record)
    read, final = split_recurrence.run_on_token_shard(
        SPLIT_RECURRENCE_FUNCTIONS, run, with_plain_states(record), shards
    )
    return read, to_recorded_state_layout(record, final)


def record_for_explain(record: LinearRecurrence) -> LinearRecurrence:
    """Returns a device's record with the shapes that its kernel gets, for `explain`; its states have other values."""
    _check_no_trees(record)
    return split_recurrence.with_initial_states(SPLIT_RECURRENCE_FUNCTIONS, with_plain_states(record))


def _check_no_trees(record: LinearRecurrence) -> None:
    if record.parents is not None:
        raise ValueError(
            "in_specs: got tokens split over devices with parents, wants the trees whole: split heads or rows"
        )


def border_tokens(record: LinearRecurrence, shards: TokenShards) -> BorderTokens:
    """Returns the tokens of a shard that its borders concern."""
    rows, tokens = record.query.shape[:2]
    if record.cu_seqlens is not None:
        return split_recurrence.packed_border_tokens(packed_borders(record.cu_seqlens, shards), shards)
    if record.segment_ids is None:
        every = jnp.ones((rows, tokens), bool)
        return BorderTokens(every, every, jnp.ones(rows, bool))
    real, restart = real_and_segment_start_tokens(record.segment_ids)
    restarts = jnp.cumsum(restart, axis=1, dtype=jnp.int32)
    index = jnp.arange(tokens, dtype=jnp.int32)
    first, last = jnp.min(jnp.where(real, index, tokens), axis=1), jnp.max(jnp.where(real, index, -1), axis=1)
    at = jnp.clip(jnp.stack([first, last], axis=1), 0, tokens - 1)
    ends = jnp.where(last[:, None] < 0, -1, jnp.take_along_axis(record.segment_ids, at, axis=1))
    return BorderTokens(real & (restarts == 0), real & (restarts == restarts[:, -1:]), restarts[:, -1] == 0, ends)


def segment_crosses_border(ends: jax.Array) -> jax.Array:
    """Returns whether a segment crosses the border before each shard, bool [P, B], from the shards' ends [P, B, 2]."""
    count, rows, _ = ends.shape
    _, restart = real_and_segment_start_tokens(jnp.moveaxis(ends, 0, 1).reshape(rows, 2 * count))
    return ~restart[:, ::2].T


def summary(run: Run, record: LinearRecurrence, border_tokens: BorderTokens) -> ShardSummary:
    """Returns the summary of a shard."""
    if has_matrix_transition(record):
        return _summary_with_matrix_factor(run, record, border_tokens)
    key_gates, value_gates = _log_gates_of_tokens(record, border_tokens.trailing)
    keys = _tokens_weighted_by_exp(record.key, _gate_sums_after_token(key_gates), border_tokens.trailing, record)
    values = _tokens_weighted_by_exp(
        _written_values(record), _gate_sums_after_token(value_gates), border_tokens.trailing, record
    )
    added = _sum_of_outer_products(keys, values, record)
    packed = border_tokens.packed
    if packed is not None and record.sequence_state is not None:
        # The sequence that goes on may have begun here, with a state of its own.
        begun = states(record)[packed.run][None] * _total_decay_factor(key_gates, value_gates, record)
        added = added + jnp.where(packed.passes & ~border_tokens.spans_shard[0], begun, 0)
    return ShardSummary(_total_decay_factor(*_log_gates_of_tokens(record, border_tokens.leading), record), added)


def _summary_with_matrix_factor(run: Run, record: LinearRecurrence, border_tokens: BorderTokens) -> ShardSummary:
    """Returns the summary of a shard with a delta rule, in two calls of the kernel."""
    packed, heads, channels = border_tokens.packed, num_state_heads(record), record.query.shape[3]
    zeros, name = (
        jnp.zeros((*record.value.shape[:3], channels), record.value.dtype),
        SPLIT_RECURRENCE_FUNCTIONS.name(record),
    )
    identity = jnp.broadcast_to(jnp.eye(channels, dtype=accumulator(record)), (heads, channels, channels))
    if packed is None:
        begin = jnp.broadcast_to(identity, (record.query.shape[0], *identity.shape))
        unread = dataclasses.replace(record, initial_state=None)
    else:
        sequence = jnp.arange(states(record).shape[0])[:, None, None, None]
        begin, unread = jnp.where(sequence == packed.entering_sequence, identity, 0), record
    effect, factor = run(dataclasses.replace(record, value=zeros, skip=None, **{name: begin}))
    read, final = run(unread)
    added = final
    if packed is not None:
        factor, added = factor[packed.entering_sequence][None], jnp.where(packed.passes, final[packed.run], 0)[None]
    return ShardSummary(factor, added, effect, (read, final))


def add_entering_state_to_results(
    record: LinearRecurrence, border_tokens: BorderTokens, summary: ShardSummary, entering_state: jax.Array
) -> Results:
    """Returns the results of a shard from those without the state that enters, [B, H, K, V]."""
    assert summary.unread is not None  # the caller looked
    read, final = summary.unread
    dtype, precision = accumulator(record), product_precision(record.query.dtype, record.precision)
    # The state has the digits of the effect: a product of 16-bit and float32 arrays would be a slow one of float32.
    # A state may exceed float16.
    state = entering_state.astype(jnp.float32 if summary.saved.dtype == jnp.float16 else summary.saved.dtype)
    more = jnp.einsum("bthk,bhkv->bthv", summary.saved, state, precision=precision, preferred_element_type=dtype)
    # Selected after the product: the state of the sequence that enters may be NaN, which reaches no other sequence.
    more = jnp.where(border_tokens.leading[..., None, None], more, 0)
    packed = border_tokens.packed
    if packed is not None:
        sequence = jnp.arange(final.shape[0])[:, None, None, None]
        ended = final + jnp.matmul(summary.factor, entering_state, precision=lax.Precision.HIGHEST)
        # Where no state enters, a factor that has overflowed would make NaN of the zeros.
        final = jnp.where((sequence == packed.entering_sequence) & jnp.any(border_tokens.leading), ended, final)
    return (read.astype(dtype) + more).astype(read.dtype), final


def entering_state_gradient(
    record: LinearRecurrence, border_tokens: BorderTokens, saved: jax.Array | None, output_cotangent: jax.Array
) -> jax.Array:
    """Returns the gradient of the state that enters a shard, where that of the state that leaves is zeros."""
    if saved is not None:
        effect = jnp.where(border_tokens.leading[..., None, None], saved, 0)
        return _sum_of_outer_products(
            effect, jnp.where(border_tokens.leading[..., None, None], output_cotangent, 0), record
        )
    key_gates, value_gates = _log_gates_of_tokens(record, border_tokens.leading)
    queries = _tokens_weighted_by_exp(
        record.query, _gate_sums_up_to_token(key_gates), border_tokens.leading, record, record.softmax_scale
    )
    return _sum_of_outer_products(
        queries,
        _tokens_weighted_by_exp(output_cotangent, _gate_sums_up_to_token(value_gates), border_tokens.leading, record),
        record,
    )


OptionalLogGates = jax.Array | None


def _log_gates_of_tokens(record: LinearRecurrence, chosen: jax.Array) -> tuple[OptionalLogGates, OptionalLogGates]:
    """Returns the logs of the gates of chosen tokens [B, T, H, ...], 0 for others, in the accumulator's dtype."""

    def log_gate_of_chosen_tokens(gate: jax.Array | None) -> OptionalLogGates:
        return None if gate is None else jnp.where(chosen[..., None, None], gate.astype(accumulator(record)), 0)

    return log_gate_of_chosen_tokens(record.decay), log_gate_of_chosen_tokens(record.value_decay)


def _total_decay_factor(
    key_gates: OptionalLogGates, value_gates: OptionalLogGates, record: LinearRecurrence
) -> jax.Array:
    """Returns the factor of all gates on a state, [B, H, K|1, V|1]; ones without gates."""
    if key_gates is None and value_gates is None:
        return jnp.ones((record.query.shape[0], num_state_heads(record), 1, 1), accumulator(record))
    keys = 0.0 if key_gates is None else jnp.sum(key_gates, axis=1)[..., None]
    values = 0.0 if value_gates is None else jnp.sum(value_gates, axis=1)[..., None, :]
    return jnp.exp(keys + values)


def _written_values(record: LinearRecurrence) -> jax.Array:
    """Returns the values that are written: times their steps, [B, T, H, V], where the record has some."""
    if record.dt is None:
        return record.value
    return jnp.repeat(record.value, num_state_heads(record) // record.value.shape[2], axis=2) * record.dt[..., None]


def _gate_sums_up_to_token(gates: OptionalLogGates) -> OptionalLogGates:
    """Returns the sum of the gates of all tokens up to each, its own included."""
    return None if gates is None else cumulative_sums(gates)


def _gate_sums_after_token(gates: OptionalLogGates) -> OptionalLogGates:
    """Returns the sum of the gates of all tokens after each. Differences of sums would be NaN after a gate of -inf."""
    if gates is None:
        return None
    later = jnp.pad(gates[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
    return cumulative_sums(later, reverse=True)


def _tokens_weighted_by_exp(
    x: jax.Array, log_weights: OptionalLogGates, chosen: jax.Array, record: LinearRecurrence, scale: float = 1.0
) -> jax.Array:
    """Returns [B, T, H, ...]: an array of all heads, weighted by the exponentials of logs; 0 for tokens not chosen."""
    x = jnp.repeat(x, num_state_heads(record) // x.shape[2], axis=2).astype(accumulator(record)) * scale
    x = x if log_weights is None else x * jnp.exp(log_weights)
    return jnp.where(chosen[..., None, None], x, 0).astype(record.query.dtype)


def _sum_of_outer_products(keys: jax.Array, values: jax.Array, record: LinearRecurrence) -> jax.Array:
    """Returns the sum over tokens of keys times values, [B, H, K, V]."""
    precision, dtype = product_precision(record.query.dtype, record.precision), accumulator(record)
    return jnp.einsum("bthk,bthv->bhkv", keys, values, precision=precision, preferred_element_type=dtype)


SPLIT_RECURRENCE_FUNCTIONS = SplitRecurrence(
    borders=border_tokens,
    enters=segment_crosses_border,
    summary=summary,
    gradient=entering_state_gradient,
    correct_results=add_entering_state_to_results,
    matrices=has_matrix_transition,
    states=states,
    name=lambda record: "initial_state" if record.cu_seqlens is None else "sequence_state",
)
"""The functions of the linear recurrence."""
