"""Both passes of the delta rule in Triton: corrections of all chunks, the states between them, then their outputs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.pullback import Pullback
from ejkernel.planning import packing
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence import delta_gradients, stages
from ejkernel_triton.linear_recurrence.backward import Gradients, gate_dtype, reduced, zero_outside_sequences
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkPasses, DeltaPasses
from ejkernel_triton.linear_recurrence.forward import initial_states
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, state_dtype


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


class DeltaPocket(NamedTuple):
    """What the backward pass need not make again; None where it has other chunks, or memory is to be spared.

    Attributes:
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, cumulative gates; None without gates.
        scores: [B, H, CHUNKS * CHUNK, CHUNK], of pairs of tokens with gates of channels; None with others.
        chunk_states: What state passing left.
    """

    gates: jax.Array | None
    scores: jax.Array | None
    chunk_states: "ChunkStates | None"


class ChunkStates(NamedTuple):
    """What state passing from chunk to chunk leaves.

    Attributes:
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        final: [B, SEQUENCES, H, K, V] float32.
        value: [B, T, H, V], what tokens write: U - W S.
        correction: W [B, T, H, K].
        inverse: (I + L)^-1, as in `Corrections`.
    """

    states: jax.Array
    final: jax.Array
    value: jax.Array
    correction: jax.Array
    inverse: jax.Array


def forward(
    record: LinearRecurrence, config: ChunkPasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaPocket]:
    """Output and final states of a record with beta, and the pocket for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes; its segments are not read.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    call = _call(record, config, config.chunk)
    kept = config.keep_states and config.backward_chunk == config.chunk
    made = _chunk_states(record, call, keep=kept)
    # What tokens write takes the place of their values: behind that, outputs are those of a plain recurrence.
    output = stages.make_outputs(dataclasses.replace(call, value=made.value), made.states)
    pocket = DeltaPocket(call.gates, call.scores, made) if kept else DeltaPocket(None, None, None)
    if record.cu_seqlens is None:
        return (output, made.final[:, -1]), (), pocket
    real = packing.packed_ids(record.cu_seqlens, call.spec.T)[0][0] >= 0
    # No chunk has the tokens of no sequence, so no program writes their outputs.
    return (jnp.where(real[None, :, None, None], output, 0), made.final[0]), (), pocket


def backward(pullback: Pullback, config: DeltaPasses) -> Gradients:
    """Gradients of the wanted fields of a record with beta.

    Args:
        pullback: Record, cotangents of output and final states, the wanted names, and the pocket of the forward pass.
        config: Chunks and tiles of both passes.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, wanted, pocket = pullback.record, pullback.wanted, pullback.pocket
    call = _call(record, config, config.backward_chunk, pocket)
    # States, corrections and the inverse again, where memory was spared.
    made = pocket.chunk_states or _chunk_states(record, call, keep=True)
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    gates = gate_dtype(record, wanted)
    gradients = _gradients(record, call, made, cotangent, pullback.cotangent[1], gates)
    if record.cu_seqlens is not None:
        gradients = zero_outside_sequences(record, gradients)
    return {name: reduced(gradients[name], getattr(record, name)) for name in sorted(wanted)}


def _gradients(
    record: LinearRecurrence,
    call: RecurrenceCall,
    made: ChunkStates,
    cotangent: jax.Array,
    final: jax.Array,
    gates: Any,
) -> Gradients:
    """The gradients of all fields; that of the gates is of no use where `gates` is None."""
    assert record.beta is not None  # `Requires` saw to it
    packed = record.cu_seqlens is not None
    state_gradients = delta_gradients.pass_state_gradients(
        call,
        made.correction,
        cotangent,
        delta_gradients.intra_chunk(call, cotangent),
        final[None] if packed else final[:, None],
        state_dtype(record),
    )
    dvalue, dy, dbeta = delta_gradients.inverse_gradients(call, record.beta, made.inverse, state_gradients.dwritten)
    written = dataclasses.replace(call, value=made.value)
    dquery, dkey, dgates, more = delta_gradients.key_gradients(
        written, record.beta, cotangent, dy, (made.states, state_gradients.dstates), gates=gates
    )
    first = state_gradients.first[0] if packed else state_gradients.first[:, 0]
    return {
        "query": dquery,
        "key": dkey,
        "value": dvalue,
        "decay": dgates,
        "beta": dbeta + more,
        "initial_state": first,
        "sequence_state": first,
    }


def tokens_of_chunk(record: LinearRecurrence, chunk: int) -> int:
    """Tokens a chunk of a record with beta, from those of its configuration.

    With gates of channels and chunks of 16 tokens Triton 3.6 computes the columns of `corrections_kernel` wrongly on
    NVIDIA's chips (see `ahead.mixed_lanes`): the four warps hold copies of one tile, the copies differ, and whichever
    warp stores last wins. With 32 tokens no such instruction is in the code.
    """
    by_channel = record.decay is not None and record.decay.shape[3] > 1
    return max(2 * MIN_TILE, chunk) if by_channel and not interpreting() else chunk


def _call(
    record: LinearRecurrence, config: ChunkPasses, chunk: int, pocket: DeltaPocket | None = None
) -> RecurrenceCall:
    # A correction is no decay: what a segment does to its first state is a matrix, so rows are not split.
    config = dataclasses.replace(config, splits=1)
    gates, scores = (None, None) if pocket is None else (pocket.gates, pocket.scores)
    call = stages.make_call(record, config, tokens_of_chunk(record, chunk), gates, scores)
    return call if scores is not None else dataclasses.replace(call, scores=stages.channel_scores(call))


def _chunk_states(record: LinearRecurrence, call: RecurrenceCall, *, keep: bool) -> ChunkStates:
    assert record.beta is not None
    inside = corrections(call, record.beta, keep=keep)
    states, final, value = stages.pass_states(
        call,
        record.key,
        inside.written,
        initial_states(record),
        dtype=state_dtype(record),
        correction=inside.correction,
    )
    return ChunkStates(states, final, value, inside.correction, inside.inverse)


def corrections(call: RecurrenceCall, beta: jax.Array, *, keep: bool) -> Corrections:
    """What tokens write apart from what the state before their chunk answers, and what takes that from it.

    Args:
        call: What the stages share.
        beta: [B, T, H].
        keep: Whether the inverse is kept for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.delta_kernel import corrections_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    inverse = (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK) if keep else (batch,)
    made = launch(
        corrections_kernel,
        (call.key, call.value, call.gates, beta, *call.spans),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.value.dtype),
            Shape((batch, spec.T, spec.H, spec.K), call.key.dtype),
            Shape(inverse, call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.score_warps,
        num_stages=config.score_stages,
        constants={"spec": spec, "BLOCK_K": config.score_block_k, "BLOCK_V": config.output_block_v, "KEEP": keep},
    )
    return Corrections(*made)
