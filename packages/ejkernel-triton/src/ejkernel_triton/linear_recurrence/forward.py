"""Forward pass of a linear recurrence in Triton: the states between chunks, then all chunks at the same time."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.planning.recurrent_states import with_plain_states
from ejkernel_triton.launch import launch
from ejkernel_triton.linear_recurrence import stages
from ejkernel_triton.linear_recurrence.config import MIN_TILE, RecurrencePasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, RecurrenceSpec, Spans, canonical, state_dtype
from ejkernel_triton.sizes import padded

TAIL_ROWS = 64
TAIL_COLUMNS = 128
"""Tokens, and numbers of a token at once, that a program looks at for tokens of no sequence."""


class RecurrencePocket(NamedTuple):
    """What the backward pass need not compute again. It computes what is None.

    Attributes:
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, cumulative gates.
        scores: [B, H, CHUNKS * CHUNK, CHUNK], scores of pairs of tokens with gates of channels.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
    """

    gates: jax.Array | None
    scores: jax.Array | None
    states: jax.Array | None


@with_plain_states
def forward(
    record: LinearRecurrence, config: RecurrencePasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], RecurrencePocket]:
    """Output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    dtype, record = record.query.dtype, canonical(record)
    call = stages.make_call(record, config, config.chunk)
    states, initial = None, starts(record, call)
    if config.walk:
        output, ends = stages.walk(call, initial)
    else:
        call = dataclasses.replace(call, scores=stages.channel_scores(call))
        states, ends, _ = stages.pass_states(call, record.key, record.value, initial, dtype=state_dtype(record))
        output = stages.make_outputs(call, states)
    final = _final(record, ends)
    if record.cu_seqlens is not None:
        # No chunk has the tokens of no sequence, so no program writes their outputs.
        output = zero_outside(output, call.spans)
    if config.backward_chunk != config.chunk:
        return (output.astype(dtype), final), (), RecurrencePocket(None, None, None)
    kept = states if config.keep_states else None
    return (output.astype(dtype), final), (), RecurrencePocket(call.gates, call.scores, kept)


def boundaries(record: LinearRecurrence, call: RecurrenceCall) -> tuple[jax.Array, jax.Array]:
    """The states before all chunks, [B, H, CHUNKS, K, V], and the final ones, as the record has them."""
    made = stages.pass_states(call, record.key, record.value, starts(record, call), dtype=state_dtype(record))
    return made[0], _final(record, made[1])


def starts(record: LinearRecurrence, call: RecurrenceCall) -> jax.Array | None:
    """Where the walks through sequences and segments begin, [B, SEQUENCES, H, K, V]; None is zeros."""
    initial = initial_states(record)
    if record.cu_seqlens is None and call.spec.SEQUENCES > 1:
        return segment_starts(call, record.key, record.value, initial)
    return initial


def _final(record: LinearRecurrence, ends: jax.Array) -> jax.Array:
    """The final states as the record has them, from those at the end of all walks."""
    return ends[0] if record.cu_seqlens is not None else ends[:, -1]


def initial_states(record: LinearRecurrence) -> jax.Array | None:
    """[B, 1, H, K, V], or [1, N, H, K, V] of packed sequences; None is zeros."""
    if record.cu_seqlens is not None:
        return None if record.sequence_state is None else record.sequence_state[None]
    return None if record.initial_state is None else record.initial_state[:, None]


def zero_outside(array: jax.Array, spans: Spans) -> jax.Array:
    """[B, T, ...] with zeros for tokens of no packed sequence."""
    from ejkernel_triton.linear_recurrence.tail_kernel import tail_kernel

    assert spans.bounds is not None  # of packed sequences
    batch, tokens, *rest = array.shape
    (made,) = launch(
        tail_kernel,
        (array, spans.bounds),
        [0],
        batch=batch,
        grid=batch * -(-tokens // TAIL_ROWS),
        num_warps=4,
        num_stages=1,
        constants={
            "T": tokens,
            "WIDTH": math.prod(rest),
            "SEQUENCES": spans.bounds.shape[1] - 2,
            "ROWS": TAIL_ROWS,
            "COLUMNS": min(TAIL_COLUMNS, padded(math.prod(rest), MIN_TILE)),
        },
    )
    return made


def segment_starts(
    call: RecurrenceCall, left: jax.Array, right: jax.Array, initial: jax.Array | None, *, reverse: bool = False
) -> jax.Array:
    """Where the walks through the segments of a row begin, [B, SEQUENCES, H, K, V] float32.

    Each segment is walked from zeros first, at the same time as the others and writing nothing but where it ends. With
    the decay of whole segments, a few additions then give where each begins.

    Args:
        call: What the stages share.
        left: [B, T, heads, K] keys or queries, as `stages.pass_states` takes them.
        right: [B, T, heads, V] values or the output's cotangent, as `stages.pass_states` takes them.
        initial: [B, 1, H, K, V], where the first walk begins; None is zeros.
        reverse: Whether to walk from the last chunk to the first.
    """
    spec, gates = call.spec, call.gates
    if not reverse:
        # Where the last segment ends no other begins.
        call = dataclasses.replace(call, spec=dataclasses.replace(spec, SEQUENCES=spec.SEQUENCES - 1))
    # Float32 ends: their rounding would reach every later segment.
    _, ends, _ = stages.pass_states(call, left, right, None, reverse=reverse)
    state = jnp.zeros_like(ends[:, 0]) if initial is None else initial[:, 0].astype(jnp.float32)
    starts = [state] * spec.SEQUENCES
    decays = None if gates is None else _segment_decays(spec, gates)
    # Unrolled: a few segments, each a multiply and an add of whole states, which XLA fuses.
    for n in range(spec.SEQUENCES)[:: -1 if reverse else 1]:
        starts[n] = state
        if n == ends.shape[1]:
            break
        state = ends[:, n] + (state if decays is None else state * decays[:, n])
    return jnp.stack(starts, axis=1)


def _segment_decays(spec: RecurrenceSpec, gates: jax.Array) -> jax.Array:
    """The factor on a state that passes through a segment, [B|1, SEQUENCES, H, K|1, 1]."""
    last = gates[:, :, spec.CHUNK - 1 :: spec.CHUNK]
    missing = spec.SEQUENCES * spec.PER_SEQUENCE - spec.CHUNKS
    last = jnp.pad(last, ((0, 0), (0, 0), (0, missing), (0, 0)))
    sums = last.reshape(*last.shape[:2], spec.SEQUENCES, spec.PER_SEQUENCE, spec.WIDTH).sum(3)
    return jnp.exp2(sums).swapaxes(1, 2)[..., None]
