"""Forward pass of the delta rule in Triton: the WY form of all chunks, the states between them, then the outputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel
from ejkernel.families.linear_recurrence.plain_states import with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence.chunked.forward import (
    chunk_outputs,
    fused_chunk_scan,
    initial_states,
    zero_padding,
)
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.delta.config import DeltaPasses
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, gate_signs, make_call
from ejkernel_triton.linear_recurrence.segments.forward import (
    delta_initial_states,
    effective_lengths,
    end_states,
    pass_states,
)
from ejkernel_triton.linear_recurrence.segments.plan import split_segments
from ejkernel_triton.linear_recurrence.spec import state_dtype


class WYForm(NamedTuple):
    """The WY form of the delta rule inside of chunks, which does not depend on the state.

    Attributes:
        u: [B, T, H, V], U: the tokens' writes if the state before their chunk is 0.
        w: [B, T, H, K], W: with S the state before its chunk, a token writes U - W S.
        inverse: [B, H, CHUNKS * CHUNK, CHUNK], the inverse of I plus the strictly lower matrix of products of keys;
            undefined unless it is stored.
    """

    u: jax.Array
    w: jax.Array
    inverse: jax.Array


class SegmentStates(NamedTuple):
    """States at the start of sequences or segments, and the segments' transitions.

    Attributes:
        starts: [B, SEQUENCES, H, K, V]; None for zeros.
        ends: [B, SEGMENTS, H, K, V + K] float32, N and M: final states of scans from zeros, and transitions. The state
            after a segment with the initial state S is N + M S. None if rows are not split.
        used: [B, SEGMENTS, H], 0 if no state, and so no gradient, passes through a segment. None if that is not known.
    """

    starts: jax.Array | None
    ends: jax.Array | None = None
    used: jax.Array | None = None


class DeltaResiduals(NamedTuple):
    """The arrays that the forward pass stores for the backward pass. An array is None if the backward pass has other
    chunks, or recomputes the array to save memory.

    Attributes:
        wy: The WY form.
        arrays: The arrays of the call for state passing: `gates` and, with gates per key channel, `query`, `key` and
            `scores`.
        segments: States at the start of sequences and segments.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        value: [B, T, H, V], the tokens' writes: U - W S.
    """

    wy: WYForm | None = None
    arrays: dict[str, jax.Array | None] | None = None
    segments: SegmentStates | None = None
    states: jax.Array | None = None
    value: jax.Array | None = None


@with_plain_states
def forward(
    record: LinearRecurrence, config: DeltaPasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaResiduals]:
    """Returns output and final states of a record with beta, and the private residuals for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no public residuals; the private
        residuals.
    """
    kept = config.keep_states and config.backward_chunk == config.chunk
    wy, call = wy_form(record, config, config.chunk, keep=kept)
    # The backward pass would recompute what a fused scan does not store, so with gradients two kernels store it: 4.67
    # ms instead of 4.75 with gates per key channel (docs/lab/linear_recurrence_gpu.md).
    stored = kept and is_differentiated()
    begin, states, value = segment_states(record, call, wy, keep=stored), None, None
    fuse = config.fused and not stored
    if fuse:
        fused = dataclasses.replace(call, value=wy.u)
        output, final = fused_chunk_scan(fused, begin.starts, w=wy.w)
    else:
        states, final, value = chunk_states(record, call, wy, begin)
        # With the tokens' writes in place of their values, outputs are those of a plain recurrence.
        output = chunk_outputs(dataclasses.replace(call, value=value), states)
    private = DeltaResiduals()
    if kept:
        private = DeltaResiduals(wy, arrays_of(call), begin if stored else None, states, value)
    if record.cu_seqlens is None:
        return (output, final[:, -1]), (), private
    # No chunk contains padding tokens, so the two kernels do not write their outputs.
    return (output if fuse else zero_padding(output, call.chunk_index), final[0]), (), private


def with_arrays(call: RecurrenceCall, arrays: Mapping[str, jax.Array | None]) -> RecurrenceCall:
    """Returns a call with the arrays of another one; if they include decayed queries and keys, its spec says so."""
    if "query" in arrays:
        spec = dataclasses.replace(call.spec, DECAYED=True, HQ=call.spec.H, HK=call.spec.H)
        call = dataclasses.replace(call, spec=spec)
    return dataclasses.replace(call, **arrays)


def arrays_of(call: RecurrenceCall) -> dict[str, jax.Array | None]:
    """Returns the arrays of a call that the WY form's kernels computed, for `with_arrays`."""
    names = ("gates", "query", "key", "scores") if call.spec.DECAYED else ("gates",)
    return {name: getattr(call, name) for name in names}


def wy_form(record: LinearRecurrence, config: DeltaPasses, chunk: int, *, keep: bool) -> tuple[WYForm, RecurrenceCall]:
    """Computes the WY form, and the call for state passing and outputs.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.
        chunk: Tokens per chunk, of this pass.
        keep: Whether the inverse is stored for the backward pass.
    """
    assert record.beta is not None  # `Requires` ensures it
    if record.decay is not None and by_channel(record):
        call = make_call(record, config, tokens_of_chunk(record, chunk), cumulative=False)
        return wy_channel_gates(call, record.decay, record.beta, keep=keep)
    call = make_call(record, config, chunk)
    return wy_fast(call, record.beta, keep=keep), call


def tokens_of_chunk(record: LinearRecurrence, chunk: int) -> int:
    """Returns the tokens per chunk of a record with beta, from the configured number.

    With gates per key channel and chunks of 16 tokens Triton 3.6 miscompiled the WY form's columns on NVIDIA's
    chips (see `ahead.miscompiled_shifts`). With 32 tokens the code has no such instruction.
    """
    return max(2 * MIN_TILE, chunk) if by_channel(record) and not interpreting() else chunk


def segment_states(record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, *, keep: bool) -> SegmentStates:
    """Computes the states at the start of sequences or segments.

    The segments of a row are first scanned in parallel: from zeros, which gives N, and from the identity with nothing
    written, which gives M. The state after a segment is N + M S, with S the state before it.

    Args:
        record: The canonical arguments.
        call: What the launches of the call share.
        wy: The WY form.
        keep: Whether the backward pass reads the transitions, including that of the last segment.
    """
    initial = initial_states(record)
    if record.cu_seqlens is not None or call.spec.SEQUENCES < 2:
        return SegmentStates(initial)
    split = split_segments(call.spec, reverse=False, zero_start=initial is None, every=keep)
    lengths = effective_lengths(call, wy.w, split)
    ends, used = end_states(call, call.key, wy.u, split, w=wy.w, lengths=lengths)
    used = None if lengths is None else used
    first = None if initial is None else initial[:, 0]
    starts = delta_initial_states(call.spec, split, ends, ends, first, used)
    return SegmentStates(starts, ends, used) if keep else SegmentStates(starts)


def chunk_states(
    record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, begin: SegmentStates
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the states before the chunks, the final states, and the tokens' writes."""
    return pass_states(
        call,
        call.key,
        wy.u,
        begin.starts,
        dtype=state_dtype(record),
        w=wy.w,
    )


def wy_fast(call: RecurrenceCall, beta: jax.Array, *, keep: bool) -> WYForm:
    """Computes the WY form.

    Args:
        call: What the launches of the call share.
        beta: [B, T, H].
        keep: Whether the inverse is stored for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_fast import wy_fast_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    inverse = (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK) if keep else (batch,)
    made = launch(
        wy_fast_kernel,
        (call.key, call.value, call.gates, beta, *call.chunk_index.per_chunk),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.value.dtype),
            Shape((batch, spec.T, spec.H, spec.K), call.key.dtype),
            Shape(inverse, call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.wy_warps,
        num_stages=1,
        constants={
            "spec": spec,
            "BLOCK_K": config.wy_block_k,
            "BLOCK_V": config.wy_block_v,
            "KEEP": keep,
        },
    )
    return WYForm(*made)


def wy_channel_gates(
    call: RecurrenceCall, decay: jax.Array, beta: jax.Array, *, keep: bool
) -> tuple[WYForm, RecurrenceCall]:
    """Returns `wy_fast` with gates per key channel, and the call whose queries and keys have their decay.

    Args:
        call: What the launches of the call share; its cumulative gates are not read.
        decay: [B|1, T|1, H, K], log gates.
        beta: [B, T, H].
        keep: Whether the inverse is stored for the backward pass.

    Returns:
        The WY form, and the call for state passing and outputs: queries and keys with their decay, both
        [B, T, H, K], the sums of chunks in place of gates, and scores.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_channel_gates import wy_channel_gates_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    tokens, pairs = (batch, spec.T, spec.H), (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK)
    dtype = call.query.dtype
    arrays = (call.query, call.key, call.value, decay, beta, gate_signs(call), *call.chunk_index.per_chunk)
    options: dict[str, Any] = {"batch": batch, "num_warps": config.wy_warps, "num_stages": 1}
    constants = {"spec": spec, "T": decay.shape[1], "BLOCK_V": config.wy_block_v, "KEEP": keep}
    u, w, inverse, scores, query, key, totals = launch(
        wy_channel_gates_kernel,
        arrays,
        [
            Shape((*tokens, spec.V), call.value.dtype),
            Shape((*tokens, spec.K), call.key.dtype),
            Shape(pairs if keep else (batch,), call.key.dtype),
            Shape(pairs, dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((batch, spec.H, spec.CHUNKS, spec.K), jnp.float32),
        ],
        **options,
        grid=batch * spec.CHUNKS * spec.H,
        constants={**constants, "BLOCK_K": config.wy_block_k},
    )
    arrays = {"query": query, "key": key, "gates": totals, "scores": scores}
    return WYForm(u, w, inverse), with_arrays(call, arrays)


def delta_config(call: RecurrenceCall) -> DeltaPasses:
    """Returns the configuration of a call of the delta rule."""
    assert isinstance(call.config, DeltaPasses)  # the configuration type of the implementation
    return call.config
