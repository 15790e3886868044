"""Both passes of the delta rule in Triton: corrections of all chunks, the states between them, then their outputs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.pullback import Pullback
from ejkernel.planning import packing
from ejkernel.planning.recurrent_states import with_plain_state_gradients, with_plain_states
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence import delta_gradients, stages
from ejkernel_triton.linear_recurrence.backward import Gradients, gate_dtype, reduced, zero_outside_sequences
from ejkernel_triton.linear_recurrence.config import MIN_TILE, DeltaPasses, by_channel
from ejkernel_triton.linear_recurrence.forward import initial_states
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


class DeltaPocket(NamedTuple):
    """What the backward pass need not make again; None where it has other chunks, or memory is to be spared.

    Attributes:
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, cumulative gates; None without gates, and from the fused kernel,
            which stores none.
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


@with_plain_states
def forward(
    record: LinearRecurrence, config: DeltaPasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaPocket]:
    """Output and final states of a record with beta, and the pocket for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes; its segments are not read.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    call = _call(record, config, config.chunk, cumulative=not _fuses(record, config))
    kept = config.keep_states and config.backward_chunk == config.chunk
    made, call = _chunk_states(record, call, keep=kept)
    # What tokens write takes the place of their values: behind that, outputs are those of a plain recurrence.
    output = stages.make_outputs(dataclasses.replace(call, value=made.value), made.states)
    gates = None if call.spec.DECAYED else call.gates
    pocket = DeltaPocket(gates, call.scores, made) if kept else DeltaPocket(None, None, None)
    if record.cu_seqlens is None:
        return (output, made.final[:, -1]), (), pocket
    real = packing.packed_ids(record.cu_seqlens, call.spec.T)[0][0] >= 0
    # No chunk has the tokens of no sequence, so no program writes their outputs.
    return (jnp.where(real[None, :, None, None], output, 0), made.final[0]), (), pocket


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
    call = _call(record, config, config.backward_chunk, pocket)
    made = pocket.chunk_states
    if made is None:
        # States, corrections and the inverse again, since memory was spared.
        made, again = _chunk_states(record, call, keep=True)
        call = dataclasses.replace(call, scores=again.scores)
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
    return max(2 * MIN_TILE, chunk) if by_channel(record) and not interpreting() else chunk


def _fuses(record: LinearRecurrence, config: DeltaPasses) -> bool:
    return config.fused and by_channel(record)


def _call(
    record: LinearRecurrence,
    config: DeltaPasses,
    chunk: int,
    pocket: DeltaPocket | None = None,
    *,
    cumulative: bool = True,
) -> RecurrenceCall:
    # A correction is no decay: what a segment does to its first state is a matrix, so rows are not split.
    config = dataclasses.replace(config, splits=1)
    gates, scores = (None, None) if pocket is None else (pocket.gates, pocket.scores)
    return stages.make_call(record, config, tokens_of_chunk(record, chunk), gates, scores, cumulative=cumulative)


def _chunk_states(record: LinearRecurrence, call: RecurrenceCall, *, keep: bool) -> tuple[ChunkStates, RecurrenceCall]:
    """What state passing leaves, and the call for outputs, with scores; where fused, of decayed queries and keys."""
    assert record.beta is not None
    if record.decay is not None and _fuses(record, delta_gradients.delta_config(call)):
        inside, call = fused_corrections(call, record.decay, record.beta, keep=keep)
    else:
        if call.scores is None:
            call = dataclasses.replace(call, scores=stages.channel_scores(call))
        inside = corrections(call, record.beta, keep=keep)
    states, final, value = stages.pass_states(
        call,
        call.key,
        inside.written,
        initial_states(record),
        dtype=state_dtype(record),
        correction=inside.correction,
    )
    return ChunkStates(states, final, value, inside.correction, inside.inverse), call


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
        constants={
            "spec": spec,
            "BLOCK_K": config.correction_block_k,
            "BLOCK_V": config.correction_block_v,
            "KEEP": keep,
            "BATCHED": config.batched_inverse,
        },
    )
    return Corrections(*made)


def fused_corrections(
    call: RecurrenceCall, decay: jax.Array, beta: jax.Array, *, keep: bool
) -> tuple[Corrections, RecurrenceCall]:
    """`corrections` with gates of channels from gates themselves, and the call whose queries and keys have their decay.

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
    arrays = (call.query, call.key, call.value, decay, beta, *call.spans)
    options: dict[str, Any] = {"batch": batch, "num_warps": config.score_warps, "num_stages": config.score_stages}
    constants = {"spec": spec, "T": decay.shape[1], "BLOCK_V": config.correction_block_v, "KEEP": keep}
    constants["BATCHED"] = config.batched_inverse
    *made, exponents = launch(
        kernels.fused_corrections_kernel,
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
    decayed = dataclasses.replace(
        call,
        spec=dataclasses.replace(spec, DECAYED=True, HQ=spec.H, HK=spec.H),
        query=query,
        key=key,
        gates=factors,
        scores=scores,
    )
    return Corrections(written, correction, inverse), decayed
