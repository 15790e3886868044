"""Both passes of the delta rule in Triton: corrections of all chunks, the states between them, then their outputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel
from ejkernel.families.linear_recurrence.plain_states import with_plain_state_gradients, with_plain_states
from ejkernel.types.pullback import Pullback, is_differentiated
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence import delta_gradients, segments, stages
from ejkernel_triton.linear_recurrence.backward import Gradients, gate_dtype, reduced, zero_outside_sequences
from ejkernel_triton.linear_recurrence.config import MIN_TILE, DeltaPasses
from ejkernel_triton.linear_recurrence.forward import initial_states, zero_outside
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, state_dtype

STRONG_CHANNELS = 32
"""Key channels at once where gates are too strong for one product of a chunk's pairs: halvings need the registers."""


class Corrections(NamedTuple):
    """The delta rule inside of chunks, which no state is needed for.

    Attributes:
        written: U [B, T, H, V], what tokens write apart from what the state before their chunk answers.
        correction: W [B, T, H, K]: with S the state before its chunk, a token writes U - W S.
        inverse: [B, H, CHUNKS * CHUNK, CHUNK], the inverse of I plus the strictly lower matrix of keys that see keys;
            of no use unless it is kept.
    """

    written: jax.Array
    correction: jax.Array
    inverse: jax.Array


class Segments(NamedTuple):
    """Where walks begin, and what a segment of a long row does to the state that it begins with.

    Attributes:
        starts: [B, SEQUENCES, H, K, V]; None is zeros.
        ends: [B, WALKED, H, K, V + K] float32, where walks from zeros end, and what a segment makes of the identity: S
            behind it is the former plus the latter times its start. None where rows are whole.
        used: [B, WALKED, H], 0 where no state passes through a segment, and so no gradient. None if it is not known.
    """

    starts: jax.Array | None
    ends: jax.Array | None = None
    used: jax.Array | None = None


class DeltaPocket(NamedTuple):
    """What the backward pass need not make again; None where it has other chunks, or memory is to be spared.

    Attributes:
        inside: The delta rule inside of chunks.
        arrays: Of the call for state passing: `gates` and, with gates of channels, `query`, `key` and `scores`.
        segments: Where the walks through sequences and segments begin.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        value: [B, T, H, V], what tokens write: U - W S.
    """

    inside: Corrections | None = None
    arrays: dict[str, jax.Array | None] | None = None
    segments: "Segments | None" = None
    states: jax.Array | None = None
    value: jax.Array | None = None


@with_plain_states
def forward(
    record: LinearRecurrence, config: DeltaPasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaPocket]:
    """Output and final states of a record with beta, and the pocket for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    kept = config.keep_states and config.backward_chunk == config.chunk
    inside, call = inside_chunks(record, config, config.chunk, keep=kept)
    # What the backward pass needs of a walk it would have to make again, so with gradients two kernels store it: 4.67
    # ms instead of 4.75 with gates of channels (docs/lab/linear_recurrence_gpu.md).
    stored = kept and is_differentiated()
    begin, states, value = find_segments(record, call, inside, keep=stored), None, None
    walks = config.walk and not stored
    if walks:
        walked = dataclasses.replace(call, value=inside.written)
        output, final = stages.walk(walked, begin.starts, correction=inside.correction)
    else:
        states, final, value = chunk_states(record, call, inside, begin)
        # What tokens write takes the place of their values: behind that, outputs are those of a plain recurrence.
        output = stages.make_outputs(dataclasses.replace(call, value=value), states)
    pocket = DeltaPocket()
    if kept:
        pocket = DeltaPocket(inside, arrays_of(call), begin if stored else None, states, value)
    if record.cu_seqlens is None:
        return (output, final[:, -1]), (), pocket
    # No chunk has the tokens of no sequence, so no program of two kernels writes their outputs.
    return (output if walks else zero_outside(output, call.spans), final[0]), (), pocket


@with_plain_state_gradients
def backward(pullback: Pullback, config: DeltaPasses) -> Gradients:
    """Gradients of the wanted fields of a record with beta.

    Args:
        pullback: Record, cotangents of output and final states, the wanted names, and the pocket of the forward pass.
        config: Chunks and tiles of both passes.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, wanted, pocket = pullback.record, pullback.wanted, pullback.pocket
    if pocket.inside is None:
        # Corrections and the inverse again, since memory was spared.
        inside, call = inside_chunks(record, config, config.backward_chunk, keep=True)
        pocket = pocket._replace(inside=inside)
    else:
        call = stages.make_call(record, config, tokens_of_chunk(record, config.backward_chunk), cumulative=False)
        call = with_arrays(call, pocket.arrays)
    if pocket.segments is None:
        pocket = pocket._replace(segments=find_segments(record, call, pocket.inside, keep=True))
    if pocket.states is None:
        states, _, value = chunk_states(record, call, pocket.inside, pocket.segments)
        pocket = pocket._replace(states=states, value=value)
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    gradients = _gradients(record, call, pocket, cotangent, pullback.cotangent[1], gate_dtype(record, wanted))
    if record.cu_seqlens is not None:
        gradients = zero_outside_sequences(call, gradients)
    return {name: reduced(gradients[name], getattr(record, name)) for name in sorted(wanted)}


def _gradients(
    record: LinearRecurrence,
    call: RecurrenceCall,
    made: DeltaPocket,
    cotangent: jax.Array,
    final: jax.Array,
    gates: Any,
) -> Gradients:
    """The gradients of all fields; that of the gates is of no use where `gates` is None."""
    assert record.beta is not None  # `Requires` saw to it
    assert made.inside is not None  # the caller did
    state_gradients = _state_gradients(record, call, made, cotangent, final)
    dvalue, dy, dbeta = delta_gradients.inverse_gradients(
        call, record.beta, made.inside.inverse, state_gradients.dwritten
    )
    # Queries and keys without their decay, and cumulative gates, which no other kernel reads with gates of channels.
    raw = stages.make_call(record, call.config, call.spec.CHUNK) if call.spec.DECAYED else call
    dquery, dkey, dgates, more = delta_gradients.key_gradients(
        dataclasses.replace(raw, value=made.value),
        record.beta,
        cotangent,
        dy,
        (cast(jax.Array, made.states), state_gradients.dstates),
        gates=gates,
    )
    first = state_gradients.first[0] if record.cu_seqlens is not None else state_gradients.first[:, 0]
    return {
        "query": dquery,
        "key": dkey,
        "value": dvalue,
        "decay": dgates,
        "beta": dbeta + more,
        "initial_state": first,
        "sequence_state": first,
    }


def _state_gradients(
    record: LinearRecurrence, call: RecurrenceCall, made: DeltaPocket, cotangent: jax.Array, final: jax.Array
) -> delta_gradients.StateGradients:
    """Gradients of states, from the last chunk of each sequence or segment to the first."""
    assert made.inside is not None  # the caller saw to both
    assert made.segments is not None
    within = delta_gradients.intra_chunk(call, cotangent)

    correction, found = made.inside.correction, made.segments

    last = final[None] if record.cu_seqlens is not None else final[:, None]
    if found.ends is not None:
        walked = segments.parts_of(call.spec, reverse=True, no_start=False)
        spec = dataclasses.replace(call.spec, SEQUENCES=walked.walks, PER_SEQUENCE=walked.chunks)
        reach = segments.reaches(call, correction, walked)
        walks = dataclasses.replace(call, spec=spec)
        ends = delta_gradients.gradient_ends(walks, correction, cotangent, within, reach)
        last = segments.delta_starts(call.spec, walked, ends, found.ends, final, found.used)
    return delta_gradients.pass_state_gradients(call, correction, cotangent, within, last, state_dtype(record))


def with_arrays(call: RecurrenceCall, arrays: Mapping[str, jax.Array | None]) -> RecurrenceCall:
    """A call with arrays that another had; with decayed queries and keys, one whose kernels are told so."""
    if "query" in arrays:
        spec = dataclasses.replace(call.spec, DECAYED=True, HQ=call.spec.H, HK=call.spec.H)
        call = dataclasses.replace(call, spec=spec)
    return dataclasses.replace(call, **arrays)


def arrays_of(call: RecurrenceCall) -> dict[str, jax.Array | None]:
    """What corrections made of a call's arrays, for `with_arrays`."""
    names = ("gates", "query", "key", "scores") if call.spec.DECAYED else ("gates",)
    return {name: getattr(call, name) for name in names}


def inside_chunks(
    record: LinearRecurrence, config: DeltaPasses, chunk: int, *, keep: bool
) -> tuple[Corrections, RecurrenceCall]:
    """The delta rule inside of chunks, and the call for state passing and outputs.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.
        chunk: Tokens a chunk, which of the two lengths.
        keep: Whether the inverse is kept for the backward pass.
    """
    assert record.beta is not None  # `Requires` saw to it
    if record.decay is not None and by_channel(record):
        call = stages.make_call(record, config, tokens_of_chunk(record, chunk), cumulative=False)
        return channel_corrections(call, record.decay, record.beta, keep=keep)
    call = stages.make_call(record, config, chunk)
    return corrections(call, record.beta, keep=keep), call


def tokens_of_chunk(record: LinearRecurrence, chunk: int) -> int:
    """Tokens a chunk of a record with beta, from those of its configuration.

    With gates of channels and chunks of 16 tokens Triton 3.6 computes columns of `strong_corrections_kernel` wrongly
    on NVIDIA's chips (see `ahead.mixed_lanes`). With 32 tokens no such instruction is in the code.
    """
    return max(2 * MIN_TILE, chunk) if by_channel(record) and not interpreting() else chunk


def find_segments(record: LinearRecurrence, call: RecurrenceCall, inside: Corrections, *, keep: bool) -> Segments:
    """Where the walks of a call begin.

    Each segment of a row is walked before, at the same time as the others: from zeros, which gives N, and with nothing
    to write from the identity, which gives M. The state S behind a segment is N + M S, with S the one before.

    Args:
        record: The canonical arguments.
        call: What the stages share.
        inside: The delta rule inside of chunks.
        keep: Whether the backward pass reads the transitions: it wants that of the last segment too.
    """
    initial = initial_states(record)
    if record.cu_seqlens is not None or call.spec.SEQUENCES < 2:
        return Segments(initial)
    walked = segments.parts_of(call.spec, reverse=False, no_start=initial is None, every=keep)
    reach = segments.reaches(call, inside.correction, walked)
    ends, used = segments.end_states(call, call.key, inside.written, walked, correction=inside.correction, reach=reach)
    used = None if reach is None else used
    first = None if initial is None else initial[:, 0]
    starts = segments.delta_starts(call.spec, walked, ends, ends, first, used)
    return Segments(starts, ends, used) if keep else Segments(starts)


def chunk_states(
    record: LinearRecurrence, call: RecurrenceCall, inside: Corrections, begin: Segments
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States before the chunks, final ones, and what tokens write."""
    return stages.pass_states(
        call,
        call.key,
        inside.written,
        begin.starts,
        dtype=state_dtype(record),
        correction=inside.correction,
    )


def corrections(call: RecurrenceCall, beta: jax.Array, *, keep: bool) -> Corrections:
    """What tokens write apart from what the state before their chunk answers, and what takes that from it.

    Args:
        call: What the stages share.
        beta: [B, T, H].
        keep: Whether the inverse is kept for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.delta_kernel import corrections_kernel

    spec, config, batch = call.spec, delta_gradients.delta_config(call), call.query.shape[0]
    inverse = (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK) if keep else (batch,)
    made = launch(
        corrections_kernel,
        (call.key, call.value, call.gates, beta, *call.spans.of_chunks),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.value.dtype),
            Shape((batch, spec.T, spec.H, spec.K), call.key.dtype),
            Shape(inverse, call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.score_warps,
        num_stages=config.score_stages,
        constants={
            "spec": spec,
            "BLOCK_K": config.correction_block_k,
            "BLOCK_V": config.correction_block_v,
            "KEEP": keep,
        },
    )
    return Corrections(*made)


def channel_corrections(
    call: RecurrenceCall, decay: jax.Array, beta: jax.Array, *, keep: bool
) -> tuple[Corrections, RecurrenceCall]:
    """`corrections` with gates of channels, and the call whose queries and keys have their decay.

    Args:
        call: What the stages share; its cumulative gates are not read.
        decay: [B|1, T|1, H, K], log gates.
        beta: [B, T, H].
        keep: Whether the inverse is kept for the backward pass.

    Returns:
        The corrections, and the call for state passing and outputs: queries and keys with their decay, both
        [B, T, H, K], the factors of chunks in place of gates, and scores.
    """
    from ejkernel_triton.linear_recurrence import delta_channels_kernel as kernels

    spec, config, batch = call.spec, delta_gradients.delta_config(call), call.query.shape[0]
    tokens, pairs = (batch, spec.T, spec.H), (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK)
    chunks, dtype = (batch, spec.H, spec.CHUNKS), call.query.dtype
    arrays = (call.query, call.key, call.value, decay, beta, *call.spans.of_chunks)
    options: dict[str, Any] = {"batch": batch, "num_warps": config.score_warps, "num_stages": config.score_stages}
    constants = {"spec": spec, "T": decay.shape[1], "BLOCK_V": config.correction_block_v, "KEEP": keep}
    *made, exponents = launch(
        kernels.channel_corrections_kernel,
        arrays,
        [
            Shape((*tokens, spec.V), call.value.dtype),
            Shape((*tokens, spec.K), call.key.dtype),
            Shape(pairs if keep else (batch,), call.key.dtype),
            Shape(pairs, dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((*chunks, 3, spec.K), jnp.float32),
            Shape(chunks, jnp.float32),
        ],
        **options,
        grid=batch * spec.CHUNKS * spec.H,
        constants={**constants, "BLOCK_K": config.correction_block_k},
    )
    # Chunks with strong gates once more, in place. The array behind them is cumulative gates, of no use to others.
    first, group = len(arrays) + 1, max(1, min(16, spec.CHUNKS * spec.H // 128))
    written, correction, inverse, scores, query, key, factors, _ = launch(
        kernels.strong_corrections_kernel,
        (*arrays, exponents, *made),
        [*range(first, first + len(made)), Shape((*pairs[:3], spec.K), jnp.float32)],
        **options,
        grid=batch * spec.H * -(-spec.CHUNKS // group),
        constants={**constants, "BLOCK_K": min(config.correction_block_k, STRONG_CHANNELS), "GROUP": group},
    )
    arrays = {"query": query, "key": key, "gates": factors, "scores": scores}
    return Corrections(written, correction, inverse), with_arrays(call, arrays)
