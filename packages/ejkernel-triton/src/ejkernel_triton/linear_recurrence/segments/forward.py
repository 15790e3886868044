"""Passes states from chunk to chunk, and computes the state at the start of each segment of a long row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.config import DEFAULT_WARPS, MIN_TILE, ChunkedConfig
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, state_stages
from ejkernel_triton.linear_recurrence.segments.plan import SubSegmentPlan, plan_sub_segments
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec
from ejkernel_triton.sizes import pad_to_power_of_two

CONSTANTS_WITHOUT_SUB_SEGMENTS: dict[str, Any] = {
    "COMPUTE_TRANSITIONS": False,
    "FIRST_SCANNED_SEGMENT": 0,
    "ROW_STARTS_FROM_ZEROS": False,
    "NUM_SCANS_WITH_FINAL_STATE": 0,
    "SUB_SEGMENTS_PER_SEGMENT": 0,
    "NUM_TILES_OF_CHUNKS_UNTIL_DECAYED": 0,
}
"""Constants of `chunk_fwd_h_kernel` in scans that are not of sub-segments."""

MAX_CHUNKS_UNTIL_DECAYED = 128
"""The number of chunks after which `find_chunks_until_decayed` gives up: the state does not decay to nothing."""

CHUNKS_PER_DECAY_CHECK = 4
"""Chunks between two checks whether the state has decayed."""

CHUNKS_UNTIL_DECAYED_MAX_STAGES = 3
"""The largest number of pipeline stages of `chunks_until_decayed_kernel`."""

CHUNKS_UNTIL_DECAYED_MAX_BLOCK_V = 64
"""The largest number of columns per program of `chunks_until_decayed_kernel`."""


def pass_states(
    call: RecurrenceCall,
    keys_or_queries: jax.Array,
    values_or_cotangent: jax.Array,
    initial_states: jax.Array | None,
    *,
    dtype: Any,
    w: jax.Array | None = None,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the states between chunks, or their gradients.

    Forwards, S = exp2(G_T) S + sum_j (exp2(G_T - G_j) dt_j k_j) v_j^T from chunk to chunk. In reverse, S =
    exp2(G_T) S + scale sum_i (exp2(G_i) q_i) do_i^T, without dt. For each chunk the state is stored before the
    chunk is added: forwards the state before it, in reverse the gradient of the state after it.

    Args:
        call: What the launches of the call share.
        keys_or_queries: [B, T, heads, K] keys, or queries.
        values_or_cotangent: [B, T, heads, V] values, or the output's cotangent.
        initial_states: [B, NUM_SEQUENCES, H, K, V], initial states of the scans; None for zeros.
        dtype: Dtype of the states that are stored.
        w: [B, T, H, K]: v_j - S^T w_j replaces v_j, with S the state before the chunk, and is stored too. A
            program then has all key channels, since S^T w_j is a sum over them.
        reverse: Whether to scan from the last chunk to the first.

    Returns:
        States [B, H, NUM_CHUNKS, K, V], those at the end of the scans [B, NUM_SEQUENCES, H, K, V] float32, and the
        corrected values [B, T, H, V], unused without `w`.
    """
    spec, batch = call.spec, keys_or_queries.shape[0]
    outputs = [
        ShapeDtype((batch, spec.H, spec.NUM_CHUNKS, spec.K, spec.V), dtype),
        ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
        ShapeDtype((batch, spec.T, spec.H, spec.V) if w is not None else (batch,), values_or_cotangent.dtype),
    ]
    return launch_chunk_fwd_h(
        call,
        (keys_or_queries, values_or_cotangent, initial_states, w, None),
        outputs,
        {"REVERSE": reverse, "STORE_CHUNK_STATES": True},
    )


def launch_chunk_fwd_h(
    call: RecurrenceCall,
    inputs: tuple[Any, ...],
    outputs: list[ShapeDtype],
    constants: dict[str, Any],
    *,
    num_warps: int = DEFAULT_WARPS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches `chunk_fwd_h_kernel` with the arrays of `pass_states`, and `chunks_until_decayed` of
    `find_chunks_until_decayed`.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.chunk_fwd_h import chunk_fwd_h_kernel

    spec, config, batch = call.spec, call.config, outputs[1].shape[0]
    left, right, initial_states, w, chunks_until_decayed = inputs
    block_k, block_v, num_stages = config.state_block_k, config.state_block_v, config.state_stages
    if w is not None:
        # The product with `w` sums over all key channels, and programs share no sums.
        block_k = pad_to_power_of_two(spec.K, MIN_TILE)
        num_stages = state_stages(call, num_stages, block_k=block_k, block_v=block_v, reads_v_new=True)
    arrays = (left, right, call.gates, call.dt, initial_states, w)
    results = launch(
        chunk_fwd_h_kernel,
        (*arrays, *call.chunk_tables.scan_kernel_inputs, chunks_until_decayed),
        outputs,
        batch=batch,
        grid=batch * spec.NUM_SEQUENCES * spec.H * cdiv(spec.K, block_k) * cdiv(outputs[1].shape[4], block_v),
        num_warps=num_warps,
        num_stages=num_stages,
        constants={
            "spec": spec,
            "KEY_HEADS": left.shape[2],
            "VALUE_HEADS": right.shape[2],
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "HAS_INITIAL_STATES": initial_states is not None,
            "HAS_W": w is not None,
            **CONSTANTS_WITHOUT_SUB_SEGMENTS,
            **constants,
        },
    )
    return results[0], results[1], results[2]


def find_chunks_until_decayed(call: RecurrenceCall, w: jax.Array, sub_segment_plan: SubSegmentPlan) -> jax.Array | None:
    """Computes the number of a segment's last chunks that the state at its end depends on; in reverse, of its first
    ones.

    Args:
        call: What the launches of the call share.
        w: [B, T, H, K], of the WY form.
        sub_segment_plan: The segments, and the direction.

    Returns:
        [B, NUM_SEQUENCES, H, tiles of columns] int32, whose maximum over tiles counts; more than the number of chunks
        if the state does not vanish within MAX_CHUNKS_UNTIL_DECAYED, and 0 for a segment that is not scanned. None if
        not known: without gates, and in float16, whose range is too small.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.chunks_until_decayed import chunks_until_decayed_kernel

    spec, config, batch = call.spec, call.config, w.shape[0]
    if spec.GATE_CHANNELS == 0 or w.dtype == jnp.float16:
        return None
    block_v = min(CHUNKS_UNTIL_DECAYED_MAX_BLOCK_V, config.state_block_v)
    num_tiles, block_k, max_stages = (
        cdiv(spec.K, block_v),
        pad_to_power_of_two(spec.K, MIN_TILE),
        min(config.state_stages, CHUNKS_UNTIL_DECAYED_MAX_STAGES),
    )
    (outputs,) = launch(
        chunks_until_decayed_kernel,
        (call.key, call.gates, w),
        [ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, num_tiles), jnp.int32)],
        batch=batch,
        grid=batch * spec.NUM_SEQUENCES * spec.H * num_tiles,
        num_warps=DEFAULT_WARPS,
        num_stages=state_stages(call, max_stages, block_k=block_k, block_v=block_v, reads_v_new=False),
        constants={
            "spec": spec,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "REVERSE": sub_segment_plan.reverse,
            "FIRST_SCANNED_SEGMENT": sub_segment_plan.first_scanned_sub_segment,
            "NUM_SCANNED_SEGMENTS": sub_segment_plan.num_scanned_sub_segments,
            "MAX_SCANNED_CHUNKS": MAX_CHUNKS_UNTIL_DECAYED,
            "CHUNKS_PER_DECAY_CHECK": CHUNKS_PER_DECAY_CHECK,
        },
    )
    return outputs


def end_states(
    call: RecurrenceCall,
    keys_or_queries: jax.Array,
    values_or_cotangent: jax.Array,
    sub_segment_plan: SubSegmentPlan,
    *,
    w: jax.Array | None = None,
    chunks_until_decayed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the final states of scans from zeros, one for each sub-segment of a row's segments.

    Args:
        call: What the launches of the call share.
        keys_or_queries: [B, T, heads, K], as for `pass_states`.
        values_or_cotangent: [B, T, heads, V], as for `pass_states`.
        sub_segment_plan: The sub-segments to scan.
        w: [B, T, H, K], as for `pass_states`.
        chunks_until_decayed: Chunks until a state has decayed, from `find_chunks_until_decayed`; with `w` only.

    Returns:
        [B, sub-segments, H, K, V] float32. With `w` there are V + K columns: the last K are the transition, which is
        the final state from the identity with nothing written. Also, with `chunks_until_decayed`, int32 [B,
        sub-segments, H]: 0 if no state passes through a sub-segment, whose last K columns are undefined.
    """
    batch = keys_or_queries.shape[0]
    spec = dataclasses.replace(
        call.spec,
        NUM_SEQUENCES=sub_segment_plan.num_scanned_sub_segments,
        CHUNKS_PER_SEGMENT=sub_segment_plan.chunks_per_sub_segment,
    )
    num_columns = spec.V if w is None else spec.V + spec.K
    outputs = [
        ShapeDtype((batch,), jnp.float32),
        ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, num_columns), jnp.float32),
        ShapeDtype((batch,) if chunks_until_decayed is None else (batch, spec.NUM_SEQUENCES, spec.H), jnp.int32),
    ]
    constants = {
        "REVERSE": sub_segment_plan.reverse,
        "STORE_CHUNK_STATES": False,
        "COMPUTE_TRANSITIONS": w is not None,
        "FIRST_SCANNED_SEGMENT": sub_segment_plan.first_scanned_sub_segment,
        "ROW_STARTS_FROM_ZEROS": sub_segment_plan.row_starts_from_zeros,
        "NUM_SCANS_WITH_FINAL_STATE": sub_segment_plan.num_scans_with_final_state,
        "SUB_SEGMENTS_PER_SEGMENT": sub_segment_plan.sub_segments_per_segment,
        "NUM_TILES_OF_CHUNKS_UNTIL_DECAYED": 0 if chunks_until_decayed is None else chunks_until_decayed.shape[3],
    }
    config, num_warps = _end_state_config(call)
    call = dataclasses.replace(call, spec=spec, config=config)
    arrays = (keys_or_queries, values_or_cotangent, None, w, chunks_until_decayed)
    return launch_chunk_fwd_h(call, arrays, outputs, constants, num_warps=num_warps)[1:]


def _end_state_config(call: RecurrenceCall) -> tuple[ChunkedConfig, int]:
    """Returns the configuration and warps of a call whose scans store final states only."""
    spec = call.spec
    # More programs per multiprocessor, so that one computes while the other waits for its state.
    config = dataclasses.replace(call.config, state_stages=min(call.config.state_stages, 2))
    is_bfloat16_128 = spec.K == spec.V == 128 and call.query.dtype.itemsize == 2
    if spec.HAS_CONSTANT_GATES and is_bfloat16_128 and gpu_of(current_device()).architecture == "hopper":
        # Keys and values are read once: 0.568 ms instead of 0.592 for 65536 tokens of lightning attention. Heads
        # without decay are the last to finish, so no second program hides their latency: a third stage gives 0.455
        # instead of 0.466.
        return dataclasses.replace(config, state_block_k=128, state_block_v=128, state_stages=3), 8
    return config, DEFAULT_WARPS


def decayed_initial_states(
    call: RecurrenceCall,
    keys_or_queries: jax.Array,
    values_or_cotangent: jax.Array,
    initial_states: jax.Array | None,
    *,
    reverse: bool = False,
) -> jax.Array:
    """Returns the states at the start of the segments of a row, [B, NUM_SEQUENCES, H, K, V] float32.

    Sub-segments are first scanned from zeros, in parallel, storing their final states only. With the decay of whole
    sub-segments, a few additions then give the state at the start of each segment.

    Args:
        call: What the launches of the call share.
        keys_or_queries: [B, T, heads, K] keys or queries, as `pass_states` takes them.
        values_or_cotangent: [B, T, heads, V] values or the output's cotangent, as `pass_states` takes them.
        initial_states: [B, 1, H, K, V], the initial state of the row; None for zeros.
        reverse: Whether to scan from the last chunk to the first.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.decayed_initial_states import decayed_initial_states_kernel

    spec, batch = call.spec, keys_or_queries.shape[0]
    sub_segment_plan = plan_sub_segments(spec, reverse=reverse, row_starts_from_zeros=initial_states is None)
    # Float32 ends: rounding errors would reach every later segment.
    sub_segment_end_states, _ = end_states(call, keys_or_queries, values_or_cotangent, sub_segment_plan)
    block_k, block_v = (min(32, pad_to_power_of_two(n, MIN_TILE)) for n in (spec.K, spec.V))
    row_initial_state = None if initial_states is None else initial_states[:, 0]
    (outputs,) = launch(
        decayed_initial_states_kernel,
        (sub_segment_end_states, call.gates, row_initial_state),
        [ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * cdiv(spec.K, block_k) * cdiv(spec.V, block_v),
        num_warps=4,
        num_stages=1,
        constants={
            "spec": spec,
            "NUM_SEGMENTS": spec.NUM_SEQUENCES,
            "SUB_SEGMENTS_PER_SEGMENT": sub_segment_plan.sub_segments_per_segment,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "PADDED_CHUNKS": pad_to_power_of_two(sub_segment_plan.chunks_per_sub_segment),
            "HAS_INITIAL_STATE": row_initial_state is not None,
            "REVERSE": reverse,
        },
    )
    return outputs


def delta_initial_states(
    spec: RecurrenceSpec,
    sub_segment_plan: SubSegmentPlan,
    end_states: jax.Array,
    transitions: jax.Array,
    row_initial_state: jax.Array | None,
    passes_state: jax.Array | None,
) -> jax.Array:
    """Computes the states at the start of segments, [B, NUM_SEQUENCES, H, K, V] float32.

    Args:
        spec: Constants.
        sub_segment_plan: The segments.
        end_states: [B, segments, H, K, V or V + K], final states of scans from zeros.
        transitions: [B, segments, H, K, V + K], whose last K columns are the transitions of the segments' initial
            states, and transposed, from the last segment to the first, of their gradients.
        row_initial_state: [B, H, K, V], the row's initial state, or in reverse the gradient of its final state; None
            for zeros.
        passes_state: [B, segments, H], 0 if no state passes through a segment; None if that is not known.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.delta_initial_states import delta_initial_states_kernel

    batch, block_v = end_states.shape[0], MIN_TILE
    (outputs,) = launch(
        delta_initial_states_kernel,
        (end_states, transitions, row_initial_state, passes_state),
        [ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * cdiv(spec.V, block_v),
        num_warps=4,
        num_stages=2,
        constants={
            "spec": spec,
            "NUM_SEGMENTS": spec.NUM_SEQUENCES,
            "NUM_SCANS_WITH_FINAL_STATE": end_states.shape[1],
            "NUM_TRANSITIONS": transitions.shape[1],
            "END_STATE_COLUMNS": end_states.shape[4],
            "FIRST_SCANNED_SEGMENT": sub_segment_plan.first_scanned_sub_segment,
            "BLOCK_K": pad_to_power_of_two(spec.K, MIN_TILE),
            "BLOCK_CONTRACTED_K": min(pad_to_power_of_two(spec.K, MIN_TILE), 32),
            "BLOCK_V": block_v,
            "HAS_INITIAL_STATE": row_initial_state is not None,
            "REVERSE": sub_segment_plan.reverse,
            "HAS_PASSES_STATE": passes_state is not None,
        },
    )
    return outputs
