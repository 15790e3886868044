"""Forward pass of a linear recurrence in Triton: the states between chunks, then all chunks at the same time."""

import dataclasses
import math
from typing import NamedTuple

import jax

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import launch
from ejkernel_triton.linear_recurrence import segments, stages
from ejkernel_triton.linear_recurrence.config import MIN_TILE, RecurrencePasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, Spans, canonical, state_dtype
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
        starts: [B, SEQUENCES, H, K, V] float32, where the segments of a long row begin.
    """

    gates: jax.Array | None = None
    scores: jax.Array | None = None
    states: jax.Array | None = None
    starts: jax.Array | None = None


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
    kept = config.backward_chunk == config.chunk
    # Two kernels store the states that the backward pass is given.
    walks = config.walk and not (kept and config.keep_states and is_differentiated())
    if walks:
        output, ends = stages.walk(call, initial)
    else:
        call = dataclasses.replace(call, scores=stages.channel_scores(call))
        states, ends, _ = stages.pass_states(call, record.key, record.value, initial, dtype=state_dtype(record))
        output = stages.make_outputs(call, states)
    final = _final(record, ends)
    if record.cu_seqlens is not None and not walks:
        # No chunk has the tokens of no sequence, so no program writes their outputs.
        output = zero_outside(output, call.spans)
    if not kept:
        return (output.astype(dtype), final), (), RecurrencePocket()
    states = states if config.keep_states else None
    of_segments = initial if record.cu_seqlens is None and call.spec.SEQUENCES > 1 else None
    return (output.astype(dtype), final), (), RecurrencePocket(call.gates, call.scores, states, of_segments)


def boundaries(record: LinearRecurrence, call: RecurrenceCall, of_segments: jax.Array | None) -> jax.Array:
    """The states before all chunks, [B, H, CHUNKS, K, V]; where segments begin is found out unless it is given."""
    initial = starts(record, call) if of_segments is None else of_segments
    return stages.pass_states(call, record.key, record.value, initial, dtype=state_dtype(record))[0]


def starts(record: LinearRecurrence, call: RecurrenceCall) -> jax.Array | None:
    """Where the walks through sequences and segments begin, [B, SEQUENCES, H, K, V]; None is zeros."""
    initial = initial_states(record)
    if record.cu_seqlens is None and call.spec.SEQUENCES > 1:
        return segments.decayed_starts(call, record.key, record.value, initial)
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
