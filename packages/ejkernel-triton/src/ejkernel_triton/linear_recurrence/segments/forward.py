"""Passes states from chunk to chunk, and computes the state at the start of each segment of a long row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, WARPS, ChunkPasses
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, state_stages
from ejkernel_triton.linear_recurrence.segments.plan import SegmentSplit, split_segments
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec
from ejkernel_triton.sizes import (
    padded,
)

LONGEST_CHUNKS = 128
"""The number of chunks after which `effective_lengths` gives up: the state does not decay to nothing."""

CHUNKS_PER_CHECK = 4
"""Chunks between two checks."""

LENGTH_STAGES = 3
"""The largest number of pipeline stages there."""

LENGTH_COLUMNS = 64
"""The largest number of columns per program there."""


def pass_states(
    call: RecurrenceCall,
    left: jax.Array,
    right: jax.Array,
    initial: jax.Array | None,
    *,
    dtype: Any,
    w: jax.Array | None = None,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the states between chunks, or their gradients.

    Forwards, S = exp2(G_T) S + sum_j (exp2(G_T - G_j) dt_j left_j) right_j^T from chunk to chunk. In reverse, S =
    exp2(G_T) S + scale sum_i (exp2(G_i) left_i) right_i^T, without dt. For each chunk the state is stored before the
    chunk is added: forwards the state before it, in reverse the gradient of the state after it.

    Args:
        call: What the launches of the call share.
        left: [B, T, heads, K] keys, or queries.
        right: [B, T, heads, V] values, or the output's cotangent.
        initial: [B, SEQUENCES, H, K, V], initial states of the scans; None for zeros.
        dtype: Dtype of the states that are stored.
        w: [B, T, H, K]: right_j - S^T w_j replaces right_j, with S the state before the chunk, and is stored too. A
            program then has all key channels, since S^T w_j is a sum over them.
        reverse: Whether to scan from the last chunk to the first.

    Returns:
        States [B, H, CHUNKS, K, V], those at the end of the scans [B, SEQUENCES, H, K, V] float32, and the corrected
        right [B, T, H, V], unused without `w`.
    """
    spec, batch = call.spec, left.shape[0]
    outputs = [
        Shape((batch, spec.H, spec.CHUNKS, spec.K, spec.V), dtype),
        Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
        Shape((batch, spec.T, spec.H, spec.V) if w is not None else (batch,), right.dtype),
    ]
    return launch_chunk_fwd_h(call, (left, right, initial, w, None), outputs, {"REVERSE": reverse, "WRITE": True})


def launch_chunk_fwd_h(
    call: RecurrenceCall,
    arrays: tuple[Any, ...],
    outputs: list[Shape],
    constants: dict[str, Any],
    *,
    num_warps: int = WARPS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches `chunk_fwd_h_kernel` with the arrays of `pass_states`, and `lengths` of `effective_lengths`."""
    from ejkernel_triton.linear_recurrence.segments.kernels.chunk_fwd_h import chunk_fwd_h_kernel

    spec, config, batch = call.spec, call.config, outputs[1].shape[0]
    left, right, initial, w, lengths = arrays
    block_k, block_v, num_stages = config.state_block_k, config.state_block_v, config.state_stages
    if w is not None:
        # The product with `w` sums over all key channels, and programs share no sums.
        block_k = padded(spec.K, MIN_TILE)
        num_stages = state_stages(call, num_stages, block_k=block_k, block_v=block_v, written=True)
    made = launch(
        chunk_fwd_h_kernel,
        (left, right, call.gates, call.dt, initial, w, *call.chunk_index.per_scan, lengths),
        outputs,
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * cdiv(spec.K, block_k) * cdiv(outputs[1].shape[4], block_v),
        num_warps=num_warps,
        num_stages=num_stages,
        constants={
            "spec": spec,
            "LEFT_HEADS": left.shape[2],
            "RIGHT_HEADS": right.shape[2],
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "INITIAL": initial is not None,
            "HAS_W": w is not None,
            "TRANSITIONS": False,
            "OFFSET": 0,
            "ZERO_START": False,
            "ENDS": 0,
            "SUB_SEGMENTS": 0,
            "LENGTH_TILES": 0,
            **constants,
        },
    )
    return made[0], made[1], made[2]


def effective_lengths(call: RecurrenceCall, w: jax.Array, split: SegmentSplit) -> jax.Array | None:
    """Computes the number of a segment's last chunks that the state at its end depends on; in reverse, of its first
    ones.

    Args:
        call: What the launches of the call share.
        w: [B, T, H, K], of the WY form.
        split: The segments, and the direction.

    Returns:
        [B, SEQUENCES, H, tiles of columns] int32, whose maximum over tiles counts; more than the number of chunks if
        the state does not vanish within LONGEST_CHUNKS, and 0 for a segment that is not scanned. None if not known:
        without gates, and in float16, whose range is too small.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.effective_length import effective_length_kernel

    spec, config, batch = call.spec, call.config, w.shape[0]
    if spec.WIDTH == 0 or w.dtype == jnp.float16:
        return None
    block = min(LENGTH_COLUMNS, config.state_block_v)
    tiles, block_k, most = cdiv(spec.K, block), padded(spec.K, MIN_TILE), min(config.state_stages, LENGTH_STAGES)
    (made,) = launch(
        effective_length_kernel,
        (call.key, call.gates, w),
        [Shape((batch, spec.SEQUENCES, spec.H, tiles), jnp.int32)],
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * tiles,
        num_warps=WARPS,
        num_stages=state_stages(call, most, block_k=block_k, block_v=block, written=False),
        constants={
            "spec": spec,
            "BLOCK_K": block_k,
            "BLOCK_V": block,
            "REVERSE": split.reverse,
            "OFFSET": split.offset,
            "SCANS": split.scans,
            "MOST": LONGEST_CHUNKS,
            "GROUP": CHUNKS_PER_CHECK,
        },
    )
    return made


def end_states(
    call: RecurrenceCall,
    left: jax.Array,
    right: jax.Array,
    split: SegmentSplit,
    *,
    w: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the final states of scans from zeros, one for each sub-segment of a row's segments.

    Args:
        call: What the launches of the call share.
        left: [B, T, heads, K], as for `pass_states`.
        right: [B, T, heads, V], as for `pass_states`.
        split: The sub-segments to scan.
        w: [B, T, H, K], as for `pass_states`.
        lengths: Effective lengths, from `effective_lengths`; with `w` only.

    Returns:
        [B, sub-segments, H, K, V] float32. With `w` there are V + K columns: the last K are the transition, which is
        the final state from the identity with nothing written. Also, with `lengths`, int32 [B, sub-segments, H]: 0 if
        no state passes through a sub-segment, whose last K columns are undefined.
    """
    batch = left.shape[0]
    spec = dataclasses.replace(call.spec, SEQUENCES=split.scans, PER_SEQUENCE=split.chunks)
    columns = spec.V if w is None else spec.V + spec.K
    outputs = [
        Shape((batch,), jnp.float32),
        Shape((batch, spec.SEQUENCES, spec.H, spec.K, columns), jnp.float32),
        Shape((batch,) if lengths is None else (batch, spec.SEQUENCES, spec.H), jnp.int32),
    ]
    constants = {
        "REVERSE": split.reverse,
        "WRITE": False,
        "TRANSITIONS": w is not None,
        "OFFSET": split.offset,
        "ZERO_START": split.zero_start,
        "ENDS": split.num_end_states,
        "SUB_SEGMENTS": split.sub_segments,
        "LENGTH_TILES": 0 if lengths is None else lengths.shape[3],
    }
    config, num_warps = _end_state_config(call)
    call = dataclasses.replace(call, spec=spec, config=config)
    arrays = (left, right, None, w, lengths)
    return launch_chunk_fwd_h(call, arrays, outputs, constants, num_warps=num_warps)[1:]


def _end_state_config(call: RecurrenceCall) -> tuple[ChunkPasses, int]:
    """Returns the configuration and warps of a call whose scans store final states only."""
    spec = call.spec
    # More programs per multiprocessor, so that one computes while the other waits for its state.
    config = dataclasses.replace(call.config, state_stages=min(call.config.state_stages, 2))
    whole = spec.K == spec.V == 128 and call.query.dtype.itemsize == 2
    if spec.CONSTANT and whole and gpu_of(current_device()).architecture == "hopper":
        # Keys and values are read once: 0.568 ms instead of 0.592 for 65536 tokens of lightning attention. Heads
        # without decay are the last to finish, so no second program hides their latency: a third stage gives 0.455
        # instead of 0.466.
        return dataclasses.replace(config, state_block_k=128, state_block_v=128, state_stages=3), 8
    return config, WARPS


def decayed_initial_states(
    call: RecurrenceCall, left: jax.Array, right: jax.Array, initial: jax.Array | None, *, reverse: bool = False
) -> jax.Array:
    """Returns the states at the start of the segments of a row, [B, SEQUENCES, H, K, V] float32.

    Sub-segments are first scanned from zeros, in parallel, storing their final states only. With the decay of whole
    sub-segments, a few additions then give the state at the start of each segment.

    Args:
        call: What the launches of the call share.
        left: [B, T, heads, K] keys or queries, as `pass_states` takes them.
        right: [B, T, heads, V] values or the output's cotangent, as `pass_states` takes them.
        initial: [B, 1, H, K, V], the initial state of the row; None for zeros.
        reverse: Whether to scan from the last chunk to the first.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.decayed_initial_states import decayed_initial_states_kernel

    spec, batch = call.spec, left.shape[0]
    split = split_segments(spec, reverse=reverse, zero_start=initial is None)
    # Float32 ends: rounding errors would reach every later segment.
    ends, _ = end_states(call, left, right, split)
    block_k, block_v = (min(32, padded(n, MIN_TILE)) for n in (spec.K, spec.V))
    first = None if initial is None else initial[:, 0]
    (made,) = launch(
        decayed_initial_states_kernel,
        (ends, call.gates, first),
        [Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * cdiv(spec.K, block_k) * cdiv(spec.V, block_v),
        num_warps=4,
        num_stages=1,
        constants={
            "spec": spec,
            "SEGMENTS": spec.SEQUENCES,
            "SUB_SEGMENTS": split.sub_segments,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "PADDED": padded(split.chunks),
            "FIRST": first is not None,
            "REVERSE": reverse,
        },
    )
    return made


def delta_initial_states(
    spec: RecurrenceSpec,
    split: SegmentSplit,
    ends: jax.Array,
    transitions: jax.Array,
    first: jax.Array | None,
    used: jax.Array | None,
) -> jax.Array:
    """Computes the states at the start of segments, [B, SEQUENCES, H, K, V] float32.

    Args:
        spec: Constants.
        split: The segments.
        ends: [B, segments, H, K, V or V + K], final states of scans from zeros.
        transitions: [B, segments, H, K, V + K], whose last K columns are the transitions of the segments' initial
            states, and transposed, from the last segment to the first, of their gradients.
        first: [B, H, K, V], the row's initial state, or in reverse the gradient of its final state; None for zeros.
        used: [B, segments, H], 0 if no state passes through a segment; None if that is not known.
    """
    from ejkernel_triton.linear_recurrence.segments.kernels.delta_initial_states import delta_initial_states_kernel

    batch, block_v = ends.shape[0], MIN_TILE
    (made,) = launch(
        delta_initial_states_kernel,
        (ends, transitions, first, used),
        [Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * cdiv(spec.V, block_v),
        num_warps=4,
        num_stages=2,
        constants={
            "spec": spec,
            "SEGMENTS": spec.SEQUENCES,
            "ENDS": ends.shape[1],
            "TRANSITIONS": transitions.shape[1],
            "END_COLUMNS": ends.shape[4],
            "SKIPPED": split.offset,
            "BLOCK_K": padded(spec.K, MIN_TILE),
            "BLOCK_J": min(padded(spec.K, MIN_TILE), 32),
            "BLOCK_V": block_v,
            "FIRST": first is not None,
            "REVERSE": split.reverse,
            "SOME": used is not None,
        },
    )
    return made
