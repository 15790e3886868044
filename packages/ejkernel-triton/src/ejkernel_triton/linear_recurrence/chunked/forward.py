"""Forward pass of a linear recurrence in Triton: first the states between chunks, then all chunks in parallel."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.chunked.config import RecurrenceConfig
from ejkernel_triton.linear_recurrence.config import DEFAULT_WARPS, MIN_TILE
from ejkernel_triton.linear_recurrence.plan import ChunkTables, RecurrenceCall, make_call
from ejkernel_triton.linear_recurrence.segments.forward import decayed_initial_states, pass_states
from ejkernel_triton.linear_recurrence.spec import cast_to_compute_dtype, state_dtype
from ejkernel_triton.sizes import pad_to_power_of_two

PADDING_TOKENS_PER_PROGRAM = 64
PADDING_ELEMENTS_PER_STEP = 128
"""The number of tokens, and of elements per token, that a program checks and zeroes at once for padding tokens."""


class ChunkedResiduals(NamedTuple):
    """The arrays that the forward pass stores for the backward pass. The backward pass recomputes an array that is
    None.

    Attributes:
        gate_cumsum: [B|1, H, NUM_CHUNKS * CHUNK_SIZE, GATE_CHANNELS] float32, cumulative gates.
        scores: [B, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE], scores of pairs of tokens with gates per key channel.
        states: [B, H, NUM_CHUNKS, K, V], the states before the chunks.
        initial_segment_states: [B, NUM_SEQUENCES, H, K, V] float32, the initial states of the segments of a long row.
    """

    gate_cumsum: jax.Array | None = None
    scores: jax.Array | None = None
    states: jax.Array | None = None
    initial_segment_states: jax.Array | None = None


@forward_with_plain_states
def forward(
    record: LinearRecurrence, config: RecurrenceConfig
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], ChunkedResiduals]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no public residuals; the private
        residuals.
    """
    dtype, record = record.query.dtype, cast_to_compute_dtype(record)
    call = make_call(record, config, config.chunk)
    states, initial_states_of_scans = None, segment_initial_states(record, call)
    has_same_chunks = config.backward_chunk == config.chunk
    # If the backward pass should get the states, two kernels run, which store them.
    run_fused_scan = config.fused and not (has_same_chunks and config.keep_states and is_differentiated())
    if run_fused_scan:
        output, end_states = fused_chunk_scan(call, initial_states_of_scans)
    else:
        call = dataclasses.replace(call, scores=intra_chunk_scores(call))
        states, end_states, _ = pass_states(
            call, record.key, record.value, initial_states_of_scans, dtype=state_dtype(record)
        )
        output = chunk_outputs(call, states)
    final_states = _final_states(record, end_states)
    if record.cu_seqlens is not None and not run_fused_scan:
        # No chunk contains padding tokens, so no program writes their outputs.
        output = zero_padding(output, call.chunk_tables)
    if not has_same_chunks:
        return (output.astype(dtype), final_states), (), ChunkedResiduals()
    states = states if config.keep_states else None
    initial_segment_states = (
        initial_states_of_scans if record.cu_seqlens is None and call.spec.NUM_SEQUENCES > 1 else None
    )
    return (
        (output.astype(dtype), final_states),
        (),
        ChunkedResiduals(call.gates, call.scores, states, initial_segment_states),
    )


def chunk_states(record: LinearRecurrence, call: RecurrenceCall, initial_segment_states: jax.Array | None) -> jax.Array:
    """Returns the states before all chunks, [B, H, NUM_CHUNKS, K, V].

    Segments' initial states are computed unless they are passed.
    """
    initial_states_of_scans = (
        segment_initial_states(record, call) if initial_segment_states is None else initial_segment_states
    )
    return pass_states(call, record.key, record.value, initial_states_of_scans, dtype=state_dtype(record))[0]


def segment_initial_states(record: LinearRecurrence, call: RecurrenceCall) -> jax.Array | None:
    """Returns the initial states of all sequences and segments, [B, NUM_SEQUENCES, H, K, V]; None for zeros."""
    initial_states_of_scans = initial_states(record)
    if record.cu_seqlens is None and call.spec.NUM_SEQUENCES > 1:
        return decayed_initial_states(call, record.key, record.value, initial_states_of_scans)
    return initial_states_of_scans


def _final_states(record: LinearRecurrence, end_states: jax.Array) -> jax.Array:
    """Returns the final states in the record's shape, from those at the end of all scans."""
    return end_states[0] if record.cu_seqlens is not None else end_states[:, -1]


def initial_states(record: LinearRecurrence) -> jax.Array | None:
    """Returns [B, 1, H, K, V], or [1, N, H, K, V] of packed sequences; None for zeros."""
    if record.cu_seqlens is not None:
        return None if record.sequence_state is None else record.sequence_state[None]
    return None if record.initial_state is None else record.initial_state[:, None]


def zero_padding(array: jax.Array, chunk_tables: ChunkTables) -> jax.Array:
    """Returns [B, T, ...] with zeros for padding tokens of packed sequences."""
    from ejkernel_triton.linear_recurrence.chunked.kernels.zero_padding import zero_padding_kernel

    assert chunk_tables.padded_cu_seqlens is not None  # true for packed sequences
    batch, tokens, *rest = array.shape
    (zeroed,) = launch(
        zero_padding_kernel,
        (array, chunk_tables.padded_cu_seqlens),
        [0],
        batch=batch,
        grid=batch * cdiv(tokens, PADDING_TOKENS_PER_PROGRAM),
        num_warps=4,
        num_stages=1,
        constants={
            "T": tokens,
            "WIDTH": math.prod(rest),
            "NUM_SEQUENCES": chunk_tables.padded_cu_seqlens.shape[1] - 2,
            "BLOCK_T": PADDING_TOKENS_PER_PROGRAM,
            "BLOCK_ELEMENTS": min(PADDING_ELEMENTS_PER_STEP, pad_to_power_of_two(math.prod(rest), MIN_TILE)),
        },
    )
    return zeroed


def fused_chunk_scan(
    call: RecurrenceCall, initial_states_of_scans: jax.Array | None, *, w: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes outputs and final states in one scan, which stores no other states; per-channel gates need the delta
    rule.

    Args:
        call: What the launches of the call share.
        initial_states_of_scans: [B, NUM_SEQUENCES, H, K, V], initial states of the scans; None for zeros.
        w: W, [B, T, H, K], of a delta rule whose values are U.

    Returns:
        Outputs [B, T, H, V], 0 for padding tokens, and [B, NUM_SEQUENCES, H, K, V] float32.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.fused_chunk_scan import fused_chunk_scan_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    arrays = (call.query, call.key, call.value, call.gates, call.dt, call.skip, initial_states_of_scans)
    output, final_states = launch(
        fused_chunk_scan_kernel,
        (*arrays, w, call.scores, *call.chunk_tables.scan_kernel_inputs),
        [
            ShapeDtype((batch, spec.T, spec.H, spec.V), call.query.dtype),
            ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
        ],
        batch=batch,
        # Packed rows have one program more, which writes zeros for padding tokens.
        grid=batch
        * (spec.NUM_SEQUENCES + (spec.CHUNKS_PER_SEGMENT == 0))
        * spec.H
        * cdiv(spec.V, config.fused_block_v),
        num_warps=DEFAULT_WARPS,
        num_stages=config.fused_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": pad_to_power_of_two(spec.K, MIN_TILE),
            "BLOCK_V": config.fused_block_v,
            "HAS_INITIAL_STATES": initial_states_of_scans is not None,
            "HAS_W": w is not None,
        },
    )
    return output, final_states


def intra_chunk_scores(call: RecurrenceCall) -> jax.Array | None:
    """Computes the scores of pairs of tokens inside each chunk, with gates per key channel.

    Returns:
        [B, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE] in the query's dtype, without the output's scale; None with other
        gates.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_fwd_intra import chunk_fwd_intra_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    if spec.GATE_CHANNELS < 2:
        return None
    (scores,) = launch(
        chunk_fwd_intra_kernel,
        (call.query, call.key, call.gates, *call.chunk_tables.chunk_kernel_inputs),
        [ShapeDtype((batch, spec.H, spec.NUM_CHUNKS * spec.CHUNK_SIZE, spec.CHUNK_SIZE), call.query.dtype)],
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * spec.H,
        num_warps=DEFAULT_WARPS,
        num_stages=1,
        constants={"spec": spec, "BLOCK_K": config.score_block_k},
    )
    return scores


def chunk_outputs(call: RecurrenceCall, states: jax.Array) -> jax.Array:
    """Returns outputs [B, T, H, V] from the states before the chunks; those of padding tokens are undefined."""
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_fwd_o import chunk_fwd_o_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    # With gates per key channel, another kernel has computed the scores of the whole chunk.
    block_t = spec.CHUNK_SIZE if spec.GATE_CHANNELS > 1 else min(spec.CHUNK_SIZE, config.output_block_t)
    (output,) = launch(
        chunk_fwd_o_kernel,
        (
            call.query,
            call.key,
            call.value,
            call.gates,
            call.scores,
            call.dt,
            call.skip,
            states,
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        [ShapeDtype((batch, spec.T, spec.H, spec.V), call.query.dtype)],
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * spec.H * (spec.CHUNK_SIZE // block_t) * cdiv(spec.V, config.output_block_v),
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": config.output_block_k,
            "BLOCK_V": config.output_block_v,
            "BLOCK_T": block_t,
        },
    )
    return output
