"""Forward pass of the delta rule in Triton: the WY form of all chunks, the states between them, then the outputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import ShapeDtype, is_interpreting, launch
from ejkernel_triton.linear_recurrence.chunked.forward import (
    chunk_outputs,
    fused_chunk_scan,
    initial_states,
    zero_padding,
)
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.delta.config import DeltaRuleConfig
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, make_call, make_gate_sum_matrices
from ejkernel_triton.linear_recurrence.segments.forward import (
    delta_initial_states,
    end_states,
    find_chunks_until_decayed,
    pass_states,
)
from ejkernel_triton.linear_recurrence.segments.plan import plan_sub_segments
from ejkernel_triton.linear_recurrence.spec import state_dtype


class WYForm(NamedTuple):
    """The WY form of the delta rule inside of chunks, which does not depend on the state.

    Attributes:
        u: [B, T, H, V], U: the tokens' writes if the state before their chunk is 0.
        w: [B, T, H, K], W: with S the state before its chunk, a token writes U - W S.
        inverse: [B, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE], the inverse of I plus the strictly lower matrix of
            products of keys; undefined unless it is stored.
    """

    u: jax.Array
    w: jax.Array
    inverse: jax.Array


class SegmentStates(NamedTuple):
    """States at the start of sequences or segments, and the segments' transitions.

    Attributes:
        initial_states: [B, NUM_SEQUENCES, H, K, V]; None for zeros.
        end_states: [B, SEGMENTS, H, K, V + K] float32, N and M: final states of scans from zeros, and transitions. The
            state after a segment with the initial state S is N + M S. None if rows are not split into segments.
        passes_state: [B, SEGMENTS, H], 0 if no state, and so no gradient, passes through a segment. None if that is not
            known.
    """

    initial_states: jax.Array | None
    end_states: jax.Array | None = None
    passes_state: jax.Array | None = None


class DeltaResiduals(NamedTuple):
    """The arrays that the forward pass stores for the backward pass. An array is None if the backward pass has other
    chunks, or recomputes the array to save memory.

    Attributes:
        wy: The WY form.
        call_arrays: The arrays of the call for state passing: `gates` and, with gates per key channel, `query`, `key`
            and `scores`.
        segment_states: States at the start of sequences and segments.
        states: [B, H, NUM_CHUNKS, K, V], the states before the chunks.
        value: [B, T, H, V], the tokens' writes: U - W S.
    """

    wy: WYForm | None = None
    call_arrays: dict[str, jax.Array | None] | None = None
    segment_states: SegmentStates | None = None
    states: jax.Array | None = None
    value: jax.Array | None = None


@forward_with_plain_states
def forward(
    record: LinearRecurrence, config: DeltaRuleConfig
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaResiduals]:
    """Returns output and final states of a record with beta, and the private residuals for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no public residuals; the private
        residuals.
    """
    stores_residuals = config.keep_states and config.backward_chunk == config.chunk
    wy, call = wy_form(record, config, config.chunk, store_inverse=stores_residuals)
    # The backward pass would recompute what a fused scan does not store, so with gradients two kernels store it: 4.67
    # ms instead of 4.75 with gates per key channel (docs/lab/linear_recurrence_gpu.md).
    stores_states = stores_residuals and is_differentiated()
    initial_segment_states, states, value = (
        compute_segment_states(record, call, wy, keep_transitions=stores_states),
        None,
        None,
    )
    run_fused_scan = config.fused and not stores_states
    if run_fused_scan:
        fused_call = dataclasses.replace(call, value=wy.u)
        output, final_states = fused_chunk_scan(fused_call, initial_segment_states.initial_states, w=wy.w)
    else:
        states, final_states, value = chunk_states(record, call, wy, initial_segment_states)
        # With the tokens' writes in place of their values, outputs are those of a plain recurrence.
        output = chunk_outputs(dataclasses.replace(call, value=value), states)
    private = DeltaResiduals()
    if stores_residuals:
        private = DeltaResiduals(
            wy, arrays_from_wy_kernels(call), initial_segment_states if stores_states else None, states, value
        )
    if record.cu_seqlens is None:
        return (output, final_states[:, -1]), (), private
    # No chunk contains padding tokens, so the two kernels do not write their outputs.
    return (output if run_fused_scan else zero_padding(output, call.chunk_tables), final_states[0]), (), private


def replace_arrays(call: RecurrenceCall, arrays: Mapping[str, jax.Array | None]) -> RecurrenceCall:
    """Returns a call with the arrays of another one; if they include decayed queries and keys, its spec says so."""
    if "query" in arrays:
        spec = dataclasses.replace(call.spec, QK_ARE_DECAYED=True, HQ=call.spec.H, HK=call.spec.H)
        call = dataclasses.replace(call, spec=spec)
    return dataclasses.replace(call, **arrays)


def arrays_from_wy_kernels(call: RecurrenceCall) -> dict[str, jax.Array | None]:
    """Returns the arrays of a call that the WY form's kernels computed, for `replace_arrays`."""
    names = ("gates", "query", "key", "scores") if call.spec.QK_ARE_DECAYED else ("gates",)
    return {name: getattr(call, name) for name in names}


def wy_form(
    record: LinearRecurrence, config: DeltaRuleConfig, chunk: int, *, store_inverse: bool
) -> tuple[WYForm, RecurrenceCall]:
    """Computes the WY form, and the call for state passing and outputs.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.
        chunk: Tokens per chunk, of this pass.
        store_inverse: Whether the inverse is stored for the backward pass.
    """
    assert record.beta is not None  # `Requires` ensures it
    if record.decay is not None and has_decay_per_channel(record):
        call = make_call(record, config, tokens_per_chunk(record, chunk), compute_gate_cumsum=False)
        return wy_channel_gates(call, record.decay, record.beta, store_inverse=store_inverse)
    call = make_call(record, config, chunk)
    return wy_fast(call, record.beta, store_inverse=store_inverse), call


def tokens_per_chunk(record: LinearRecurrence, chunk: int) -> int:
    """Returns the tokens per chunk of a record with beta, from the configured number.

    With gates per key channel and chunks of 16 tokens Triton 3.6 miscompiled the WY form's columns on NVIDIA's
    chips (see `ahead.miscompiled_shifts`). With 32 tokens the code has no such instruction.
    """
    return max(2 * MIN_TILE, chunk) if has_decay_per_channel(record) and not is_interpreting() else chunk


def compute_segment_states(
    record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, *, keep_transitions: bool
) -> SegmentStates:
    """Computes the states at the start of sequences or segments.

    The segments of a row are first scanned in parallel: from zeros, which gives N, and from the identity with nothing
    written, which gives M. The state after a segment is N + M S, with S the state before it.

    Args:
        record: The canonical arguments.
        call: What the launches of the call share.
        wy: The WY form.
        keep_transitions: Whether the backward pass reads the transitions, including that of the last segment.
    """
    initial = initial_states(record)
    if record.cu_seqlens is not None or call.spec.NUM_SEQUENCES < 2:
        return SegmentStates(initial)
    sub_segment_plan = plan_sub_segments(
        call.spec, reverse=False, row_starts_from_zeros=initial is None, scan_last_segment=keep_transitions
    )
    chunks_until_decayed = find_chunks_until_decayed(call, wy.w, sub_segment_plan)
    segment_end_states, passes_state = end_states(
        call, call.key, wy.u, sub_segment_plan, w=wy.w, chunks_until_decayed=chunks_until_decayed
    )
    passes_state = None if chunks_until_decayed is None else passes_state
    row_initial_state = None if initial is None else initial[:, 0]
    initial_states_of_segments = delta_initial_states(
        call.spec, sub_segment_plan, segment_end_states, segment_end_states, row_initial_state, passes_state
    )
    return (
        SegmentStates(initial_states_of_segments, segment_end_states, passes_state)
        if keep_transitions
        else SegmentStates(initial_states_of_segments)
    )


def chunk_states(
    record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, initial_segment_states: SegmentStates
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the states before the chunks, the final states, and the tokens' writes."""
    return pass_states(
        call,
        call.key,
        wy.u,
        initial_segment_states.initial_states,
        dtype=state_dtype(record),
        w=wy.w,
    )


def wy_fast(call: RecurrenceCall, beta: jax.Array, *, store_inverse: bool) -> WYForm:
    """Computes the WY form.

    Args:
        call: What the launches of the call share.
        beta: [B, T, H].
        store_inverse: Whether the inverse is stored for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_fast import wy_fast_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    inverse = (batch, spec.H, spec.NUM_CHUNKS * spec.CHUNK_SIZE, spec.CHUNK_SIZE) if store_inverse else (batch,)
    outputs = launch(
        wy_fast_kernel,
        (call.key, call.value, call.gates, beta, *call.chunk_tables.chunk_kernel_inputs),
        [
            ShapeDtype((batch, spec.T, spec.H, spec.V), call.value.dtype),
            ShapeDtype((batch, spec.T, spec.H, spec.K), call.key.dtype),
            ShapeDtype(inverse, call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * spec.H,
        num_warps=config.wy_warps,
        num_stages=1,
        constants={
            "spec": spec,
            "BLOCK_K": config.wy_block_k,
            "BLOCK_V": config.wy_block_v,
            "STORE_INVERSE": store_inverse,
        },
    )
    return WYForm(*outputs)


def wy_channel_gates(
    call: RecurrenceCall, decay: jax.Array, beta: jax.Array, *, store_inverse: bool
) -> tuple[WYForm, RecurrenceCall]:
    """Returns `wy_fast` with gates per key channel, and the call whose queries and keys have their decay.

    Args:
        call: What the launches of the call share; its cumulative gates are not read.
        decay: [B|1, T|1, H, K], log gates.
        beta: [B, T, H].
        store_inverse: Whether the inverse is stored for the backward pass.

    Returns:
        The WY form, and the call for state passing and outputs: queries and keys with their decay, both
        [B, T, H, K], the sums of chunks in place of gates, and scores.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_channel_gates import wy_channel_gates_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    tokens, scores_shape = (batch, spec.T, spec.H), (batch, spec.H, spec.NUM_CHUNKS * spec.CHUNK_SIZE, spec.CHUNK_SIZE)
    dtype = call.query.dtype
    arrays = (
        call.query,
        call.key,
        call.value,
        decay,
        beta,
        make_gate_sum_matrices(call),
        *call.chunk_tables.chunk_kernel_inputs,
    )
    options: dict[str, Any] = {"batch": batch, "num_warps": config.wy_warps, "num_stages": 1}
    constants = {"spec": spec, "T": decay.shape[1], "BLOCK_V": config.wy_block_v, "STORE_INVERSE": store_inverse}
    u, w, inverse, scores, query, key, totals = launch(
        wy_channel_gates_kernel,
        arrays,
        [
            ShapeDtype((*tokens, spec.V), call.value.dtype),
            ShapeDtype((*tokens, spec.K), call.key.dtype),
            ShapeDtype(scores_shape if store_inverse else (batch,), call.key.dtype),
            ShapeDtype(scores_shape, dtype),
            ShapeDtype((*tokens, spec.K), dtype),
            ShapeDtype((*tokens, spec.K), dtype),
            ShapeDtype((batch, spec.H, spec.NUM_CHUNKS, spec.K), jnp.float32),
        ],
        **options,
        grid=batch * spec.NUM_CHUNKS * spec.H,
        constants={**constants, "BLOCK_K": config.wy_block_k},
    )
    arrays = {"query": query, "key": key, "gates": totals, "scores": scores}
    return WYForm(u, w, inverse), replace_arrays(call, arrays)


def delta_config(call: RecurrenceCall) -> DeltaRuleConfig:
    """Returns the configuration of a call of the delta rule."""
    assert isinstance(call.config, DeltaRuleConfig)  # the configuration type of the implementation
    return call.config
