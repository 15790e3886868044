"""Defines the argument record of the chunked linear recurrence, and functions of the record alone."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning import slots
from ejkernel.types.arguments import arguments, static


@arguments
class LinearRecurrence:
    """Canonical input of one recurrence. B rows, T tokens, H heads, K key channels, V value channels, N sequences.

    Query, key and value may each have fewer heads than H: head h reads head `h // (H // heads)` of them.

    Attributes:
        query: [B, T, Hq, K] floating.
        key: [B, T, Hk, K], same dtype as query.
        value: [B, T, Hv, V] floating.
        softmax_scale: Factor on the output.
        decay: [B|1, T|1, H, K|1] floating, log of the factor on the state's rows.
        value_decay: [B, T, H, V] floating, log of the factor on the state's columns.
        beta: [B, T, H] floating; its presence makes the recurrence a delta rule.
        dt: [B, T, H] floating, factor on what a token writes; not with beta.
        low_rank_write: [B, T, H, K] floating, with low_rank_read: a token also writes with this vector what the
            other reads of the state before the token; not with value_decay, beta or dt.
        low_rank_read: [B, T, H, K] floating, the vector that reads.
        skip: [1, 1, H] floating, factor on what a token's own value adds to its output.
        initial_state: [B, H, K, V] floating, the state before the first token of every row; None is zeros.
        cu_seqlens: [N + 1] int, with B = 1: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]`, and each has a
            state of its own. Empty sequences are allowed.
        sequence_state: [N, H, K, V] floating, the state before each packed sequence; None is zeros. With
            `state_slots`, the slots [S, H, K, V] that hold them.
        state_slots: [N] int, the slot in which each packed sequence has its state; those of sequences with tokens
            differ. Outside of 0 to S - 1: the sequence starts from zeros, and its state is not kept. The final states
            are then the slots, in their dtype, of which only those of sequences with tokens have changed.
        segment_ids: [B, T] int32; a token whose id differs from that of the last real token before it starts from a
            zero state, and negative ids are padding. The first real token continues from the initial state.
        parents: [B, T] int, the token that each token continues, by its index among those of its row or sequence; -1
            continues the initial state. The final states are then those after each token, [B, T, H, K, V], zeros for
            padding tokens, and slots do not change. Not with segment_ids.
        keeps_token_states: Whether a record with parents has those final states. Otherwise its final states are those
            before the tokens, in slots or out of them, and no state after a token is stored.
        transposed_states: Whether states are [..., V, K], those at the end too.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    softmax_scale: float = static()
    decay: jax.Array | None = None
    value_decay: jax.Array | None = None
    beta: jax.Array | None = None
    dt: jax.Array | None = None
    skip: jax.Array | None = None
    low_rank_write: jax.Array | None = None
    low_rank_read: jax.Array | None = None
    initial_state: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    sequence_state: jax.Array | None = None
    segment_ids: jax.Array | None = None
    state_slots: jax.Array | None = None
    parents: jax.Array | None = None
    keeps_token_states: bool = static(default=True)
    transposed_states: bool = static(default=False)
    precision: lax.Precision | None = static(default=None)


class SlottedStates(NamedTuple):
    """States in slots.

    Attributes:
        slots: [S, H, K, V], or transposed.
        indices: [N] int, the slot of each sequence.
        starts: [N + 1] int, cumulative lengths of the sequences.
    """

    slots: jax.Array
    indices: jax.Array
    starts: jax.Array


TOKEN_FIELDS = (
    "query",
    "key",
    "value",
    "decay",
    "value_decay",
    "beta",
    "dt",
    "skip",
    "low_rank_write",
    "low_rank_read",
)
"""The record fields with an entry for every token, [B|1, T|1, heads, ...]."""


def accumulator(record: LinearRecurrence) -> Any:
    """Returns the dtype of states and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def has_decay_per_channel(record: LinearRecurrence) -> bool:
    """Returns whether each key channel has a gate of its own."""
    return record.decay is not None and record.decay.shape[3] > 1


def has_matrix_transition(record: LinearRecurrence) -> bool:
    """Returns whether a token's factor on the state is a matrix, which mixes its key channels: that of gates is not."""
    return record.beta is not None or record.low_rank_read is not None


def num_state_heads(record: LinearRecurrence) -> int:
    """Returns H: the heads that have a state of their own."""
    return max(record.query.shape[2], record.value.shape[2])


def has_token_states(record: LinearRecurrence) -> bool:
    """Returns whether the final states of a record are those after every token."""
    return record.parents is not None and record.keeps_token_states


def with_plain_states(record: LinearRecurrence) -> LinearRecurrence:
    """Returns the record with states [B, H, K, V] or [N, H, K, V]: read out of slots, and not transposed."""
    initial_states = {"initial_state": record.initial_state, "sequence_state": record.sequence_state}
    if (held := slotted_states(record)) is not None:
        initial_states["sequence_state"] = slots.read_slots(held.slots, held.indices, held.starts)
    if record.transposed_states:
        initial_states = {name: None if x is None else x.swapaxes(2, 3) for name, x in initial_states.items()}
    return dataclasses.replace(record, **initial_states, state_slots=None, transposed_states=False)


def to_recorded_state_layout(record: LinearRecurrence, final: jax.Array) -> jax.Array:
    """Returns the final states of a record, from those of the same record with plain states."""
    final = final.swapaxes(-2, -1) if record.transposed_states else final
    held = slotted_states(record)
    if held is None or has_token_states(record):
        return final
    if record.parents is not None:
        return held.slots
    return slots.write_slots(held.slots, held.indices, held.starts, final)


def unchanged_states(record: LinearRecurrence) -> jax.Array:
    """Returns the states before the tokens as the final states of a record whose trees keep none."""
    return to_recorded_state_layout(record, states(with_plain_states(record)))


def slotted_states(record: LinearRecurrence) -> SlottedStates | None:
    """Returns the states of packed sequences in slots; None where a record has them elsewhere, or none."""
    held, indices, starts = record.sequence_state, record.state_slots, record.cu_seqlens
    return None if held is None or indices is None or starts is None else SlottedStates(held, indices, starts)


def states(record: LinearRecurrence) -> jax.Array:
    """Returns the states before the first tokens of a record with plain states: [B, H, K, V], or [N, H, K, V] of packed
    sequences, in the accumulator."""
    state = record.initial_state if record.cu_seqlens is None else record.sequence_state
    if state is not None:
        return state.astype(accumulator(record))
    rows = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return jnp.zeros((rows, num_state_heads(record), record.query.shape[3], record.value.shape[3]), accumulator(record))


def final_states_shape(record: LinearRecurrence) -> tuple[int, ...]:
    """Returns the shape of final states that are not transposed: [B, H, K, V], [N, H, K, V] or [B, T, H, K, V]."""
    rows = record.query.shape[: 2 if has_token_states(record) else 1]
    if record.cu_seqlens is not None and not has_token_states(record):
        rows = (record.cu_seqlens.shape[0] - 1,)
    return (*rows, num_state_heads(record), record.query.shape[3], record.value.shape[3])


def real_and_segment_start_tokens(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which tokens are real and which start from a zero state, both bool [B, T].

    Args:
        segment_ids: [B, T] int, as in `LinearRecurrence`.
    """
    real = segment_ids >= 0
    index = jnp.where(real, jnp.arange(segment_ids.shape[1], dtype=jnp.int32), -1)
    latest = jnp.pad(lax.cummax(index, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.take_along_axis(segment_ids, jnp.maximum(latest, 0), axis=1)
    return real, real & (latest >= 0) & (segment_ids != before)
