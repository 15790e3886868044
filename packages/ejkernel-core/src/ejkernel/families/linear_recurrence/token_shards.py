"""The linear recurrence with its tokens split over devices: the summaries of a shard.

With a gate per head or none, the factor of tokens on a state is the product of their gates, and the state that they add
is one product of keys and values, each weighted by the gates after it. A kernel may compute that without outputs. Where
the gates of the tokens at a border forget what was before, no others count. Others are `piece_summaries`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families import split_recurrence
from ejkernel.families.linear_recurrence.piece_summaries import (
    FactorAndState,
    gradient_of_pieces,
    is_forgotten,
    log_decay,
    slice_tokens,
    summary_of_pieces,
    zeros_where,
)
from ejkernel.families.linear_recurrence.record import (
    LinearRecurrence,
    accumulator,
    has_decay_per_channel,
    has_matrix_transition,
    num_state_heads,
    real_and_segment_start_tokens,
    states,
    to_recorded_state_layout,
    with_plain_states,
)
from ejkernel.families.split_recurrence import BorderTokens, Run, ShardSummary, SplitRecurrence, cumulative_sums
from ejkernel.planning.precision import product_precision
from ejkernel.planning.token_shards import TokenShards, apply_factor, packed_borders

GATED_TOKENS_AT_BORDER = 8192
"""The tokens at a border that are tried as the summary of a shard."""


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
    packed, summarise = border_tokens.packed, _summary_with_gates_of_heads
    if has_matrix_transition(record) or _has_gates_of_channels(record):
        summarise = summary_of_pieces
    factor, added = summarise(run, record, border_tokens.trailing)
    if packed is not None and record.sequence_state is not None:
        # The sequence that goes on may have begun here, with a state of its own.
        begun = apply_factor(factor, states(record)[packed.run][None], has_matrix_transition(record))
        added = added + jnp.where(packed.passes & ~border_tokens.spans_shard[0], begun, 0)
    return ShardSummary(factor, added)


def entering_state_gradient(
    run: Run,
    record: LinearRecurrence,
    border_tokens: BorderTokens,
    output_cotangent: jax.Array,
    ended_state_cotangent: jax.Array | None,
) -> jax.Array:
    """Returns the gradient of the state that enters a shard, where that of the state that leaves is zeros.

    Args:
        run: Computes a record of one device.
        record: The record of this device's tokens.
        border_tokens: The tokens of the shard that its borders concern.
        output_cotangent: Cotangent of this device's outputs.
        ended_state_cotangent: [B, H, K, V], cotangent of the state after the leading tokens; None for zeros.
    """
    leading, has_matrix = border_tokens.leading, has_matrix_transition(record)
    if has_matrix or _has_gates_of_channels(record):
        factor, gradient = gradient_of_pieces(run, record, leading, output_cotangent, ended_state_cotangent)
    else:
        factor, gradient = _gradient_with_gates_of_heads(run, record, leading, output_cotangent)
    if ended_state_cotangent is None:
        return gradient
    return gradient + apply_factor(factor, ended_state_cotangent, has_matrix)


def _has_gates_of_channels(record: LinearRecurrence) -> bool:
    """Returns whether each key or value channel has a gate of its own."""
    return record.value_decay is not None or has_decay_per_channel(record)


def _summary_with_gates_of_heads(run: Run, record: LinearRecurrence, trailing: jax.Array) -> FactorAndState:
    """Returns the factor [B, H, 1, 1] of the trailing tokens, and the state [B, H, K, V] that they add."""
    tokens = record.query.shape[1]

    def add_up(first: int) -> jax.Array:
        part = slice_tokens(record, first, tokens, trailing)
        return _sum_of_outer_products(part.key, _written_values(part), _gate_sums_after_token(part), part)

    def factor_of(first: int) -> jax.Array:
        return jnp.exp(log_decay(slice_tokens(record, first, tokens, trailing)))

    added = split_recurrence.states_of_rows(run, slice_tokens(record, 0, tokens, trailing))
    if added is not None:
        return factor_of(0), added
    near = max(0, tokens - GATED_TOKENS_AT_BORDER)
    if near == 0:
        return factor_of(0), add_up(0)
    factor, continues = factor_of(near), jnp.any(trailing[:, :near], axis=1)
    return lax.cond(
        is_forgotten(factor, continues),
        lambda: (zeros_where(continues, factor), add_up(near)),
        lambda: (factor_of(0), add_up(0)),
    )


def _gradient_with_gates_of_heads(
    run: Run, record: LinearRecurrence, leading: jax.Array, output_cotangent: jax.Array
) -> FactorAndState:
    """Returns the factor [B, H, 1, 1] of the leading tokens, and the gradient of the state before them."""
    tokens, cotangent = record.query.shape[1], jnp.where(leading[..., None, None], output_cotangent, 0)

    def add_up(end: int) -> jax.Array:
        part = slice_tokens(record, 0, end, leading)
        added = _sum_of_outer_products(part.query, cotangent[:, :end], _gate_sums_up_to_token(part), part)
        return added * record.softmax_scale

    def factor_of(end: int) -> jax.Array:
        return jnp.exp(log_decay(slice_tokens(record, 0, end, leading)))

    added = split_recurrence.states_of_rows(run, slice_tokens(record, 0, tokens, leading), cotangent)
    if added is not None:
        return factor_of(tokens), added
    near = min(tokens, GATED_TOKENS_AT_BORDER)
    if near == tokens:
        return factor_of(tokens), add_up(tokens)
    factor, continues = factor_of(near), jnp.any(leading[:, near:], axis=1)
    return lax.cond(
        is_forgotten(factor, continues),
        lambda: (zeros_where(continues, factor), add_up(near)),
        lambda: (factor_of(tokens), add_up(tokens)),
    )


def _written_values(record: LinearRecurrence) -> jax.Array:
    """Returns the values that are written: times their steps, [B, T, H, V], where the record has some."""
    if record.dt is None:
        return record.value
    return jnp.repeat(record.value, num_state_heads(record) // record.value.shape[2], axis=2) * record.dt[..., None]


def _gate_sums_up_to_token(record: LinearRecurrence) -> jax.Array | None:
    """Returns the sum of the gates of all tokens up to each, its own included."""
    return None if record.decay is None else cumulative_sums(record.decay.astype(accumulator(record)))


def _gate_sums_after_token(record: LinearRecurrence) -> jax.Array | None:
    """Returns the sum of the gates of all tokens after each. Differences of sums would be NaN after a gate of -inf."""
    if record.decay is None:
        return None
    later = jnp.pad(record.decay[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
    return cumulative_sums(later.astype(accumulator(record)), reverse=True)


def _sum_of_outer_products(
    keys: jax.Array, values: jax.Array, log_weights: jax.Array | None, record: LinearRecurrence
) -> jax.Array:
    """Returns the sum over tokens of keys times values times the exponentials of logs [B, T, H, 1], [B, H, K, V]. Heads
    that share keys are one matrix product.
    """
    dtype, heads = accumulator(record), num_state_heads(record)
    values = jnp.repeat(values, heads // values.shape[2], axis=2)
    if log_weights is not None:
        values = values.astype(dtype) * jnp.exp(log_weights)
    values = values.astype(record.query.dtype).reshape(
        *values.shape[:2], keys.shape[2], heads // keys.shape[2], values.shape[3]
    )
    precision = product_precision(record.query.dtype, record.precision)
    added = jnp.einsum("btgk,btgrv->bgrkv", keys, values, precision=precision, preferred_element_type=dtype)
    return added.reshape(added.shape[0], heads, *added.shape[3:])


SPLIT_RECURRENCE_FUNCTIONS = SplitRecurrence(
    borders=border_tokens,
    enters=segment_crosses_border,
    summary=summary,
    gradient=entering_state_gradient,
    matrices=has_matrix_transition,
    states=states,
    name=lambda record: "initial_state" if record.cu_seqlens is None else "sequence_state",
)
"""The functions of the linear recurrence."""
