"""Computes the initial states of the segments of a long row from the final states of scans from zeros.

    segments     |   0   |   1   |   2   |   3   |
    ends         N0      N1      N2                   scans from zeros, in parallel (`chunk_fwd_h_kernel`)
    starts       S0      S1 = N0 + M0 S0    S2 = N1 + M1 S1    S3 = N2 + M2 S2

M is a segment's transition of its initial state: factors per key channel, or a matrix with the delta rule. In reverse,
gradients of states go from the last segment to the first, by the transpose of M.
"""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import gates_address, load_constant_gate, load_state, store_state
from ejkernel_triton.linear_recurrence.segments.kernels.chunks_until_decayed import constant_gate_chunks_until_decayed


@triton.jit
def segment_decay(
    base,
    constant_log2_gate,
    segment,
    channels,
    spec: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """Returns the decay of a state over NUM_CHUNKS chunks of a segment: [channels], or a scalar."""
    if spec.HAS_CONSTANT_GATES:
        start = segment * NUM_CHUNKS * spec.CHUNK_SIZE
        return tl.exp2(constant_log2_gate * tl.minimum(spec.T - start, NUM_CHUNKS * spec.CHUNK_SIZE).to(tl.float32))
    chunk = segment * NUM_CHUNKS + tl.arange(0, PADDED_CHUNKS)
    is_chunk = (tl.arange(0, PADDED_CHUNKS) < NUM_CHUNKS) & (chunk < spec.NUM_CHUNKS)
    # The last row of a chunk has the sum of its gates.
    at = (chunk * spec.CHUNK_SIZE + (spec.CHUNK_SIZE - 1)) * spec.GATE_CHANNELS
    if spec.GATE_CHANNELS == 1:
        return tl.exp2(tl.sum(tl.load(base + at, mask=is_chunk, other=0.0), 0))
    else:
        in_bounds = is_chunk[:, None] & (channels < spec.K)[None, :]
        return tl.exp2(tl.sum(tl.load(base + (at[:, None] + channels[None, :]), mask=in_bounds, other=0.0), 0))


@triton.jit
def decayed_initial_states_kernel(
    end_states,
    gates,
    initial_state,
    initial_segment_states,
    spec: tl.constexpr,
    per: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SUB_SEGMENTS_PER_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Computes the initial states of segments with SUB_SEGMENTS_PER_SEGMENT sub-segments each, without the delta rule.

    See `forward.decayed_initial_states`.
    """
    NUM_K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    NUM_CHUNKS: tl.constexpr = spec.CHUNKS_PER_SEGMENT // SUB_SEGMENTS_PER_SEGMENT
    program = tl.program_id(0)
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    k_start = (program % NUM_K_TILES) * BLOCK_K
    program = program // NUM_K_TILES
    head = program % spec.H
    row = program // spec.H
    channels = k_start + tl.arange(0, BLOCK_K)
    STATE_SIZE: tl.constexpr = spec.K * spec.V
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL_STATE:
        state_row = tl.cast(row // per.INITIAL_STATE, tl.int64) * spec.H + head
        acc = load_state(initial_state + state_row * STATE_SIZE, k_start, v_start, BLOCK_K, BLOCK_V, spec).to(
            tl.float32
        )
    gates_base = gates_address(gates, row, head, 0, spec, per)
    constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
    num_chunks_until_decayed = 0
    if spec.HAS_CONSTANT_GATES:
        num_chunks_until_decayed = constant_gate_chunks_until_decayed(constant_log2_gate, spec)
    # Unrolled, so that no load waits for the state.
    for step in tl.static_range(0, NUM_SEGMENTS):
        segment = NUM_SEGMENTS - 1 - step if REVERSE else step
        to = (tl.cast(row, tl.int64) * NUM_SEGMENTS + segment) * spec.H + head
        store_state(initial_segment_states + to * STATE_SIZE, acc, k_start, v_start, spec)
        if step < NUM_SEGMENTS - 1:
            for n in tl.static_range(0, SUB_SEGMENTS_PER_SEGMENT):
                sub_segment = segment * SUB_SEGMENTS_PER_SEGMENT + (SUB_SEGMENTS_PER_SEGMENT - 1 - n if REVERSE else n)
                # The segment that is scanned last leaves its state to no other, so the arrays have no entries for it:
                # the last segment, or the first one in reverse.
                index = sub_segment - SUB_SEGMENTS_PER_SEGMENT if REVERSE else sub_segment
                at = (tl.cast(row, tl.int64) * ((NUM_SEGMENTS - 1) * SUB_SEGMENTS_PER_SEGMENT) + index) * spec.H + head
                if spec.GATE_CHANNELS == 1:
                    acc *= segment_decay(
                        gates_base, constant_log2_gate, sub_segment, channels, spec, NUM_CHUNKS, PADDED_CHUNKS
                    )
                if spec.GATE_CHANNELS > 1:
                    acc *= segment_decay(
                        gates_base, constant_log2_gate, sub_segment, channels, spec, NUM_CHUNKS, PADDED_CHUNKS
                    )[:, None]
                if spec.HAS_CONSTANT_GATES:
                    # The scan stored nothing for sub-segments that decay to nothing before the segment's end.
                    num_valid_channels = tl.where(
                        (SUB_SEGMENTS_PER_SEGMENT - 1 - n) * NUM_CHUNKS < num_chunks_until_decayed, spec.K, 0
                    )
                    columns = v_start + tl.arange(0, BLOCK_V)
                    in_bounds = (channels < num_valid_channels)[:, None] & (columns < spec.V)[None, :]
                    end_state_pointers = end_states + at * STATE_SIZE + (channels[:, None] * spec.V + columns[None, :])
                    acc += tl.load(end_state_pointers, mask=in_bounds, other=0.0)
                else:
                    acc += load_state(end_states + at * STATE_SIZE, k_start, v_start, BLOCK_K, BLOCK_V, spec)
