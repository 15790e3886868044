"""Computes the initial states of the segments of a long row from the final states of scans from zeros.

    segments     |   0   |   1   |   2   |   3   |
    ends         N0      N1      N2                   scans from zeros, in parallel (`chunk_fwd_h_kernel`)
    starts       S0      S1 = N0 + M0 S0    S2 = N1 + M1 S1    S3 = N2 + M2 S2

M is a segment's transition of its initial state: factors per key channel, or a matrix with the delta rule. In reverse,
gradients of states go from the last segment to the first, by the transpose of M.
"""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import constant_gate, gates_base, load_state, store_state
from ejkernel_triton.linear_recurrence.segments.kernels.effective_length import constant_effective_length


@triton.jit
def decay_of(base, constant, segment, channels, spec: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Returns the decay of a state over CHUNKS chunks of a segment: [channels], or a scalar."""
    if spec.CONSTANT:
        start = segment * CHUNKS * spec.CHUNK
        return tl.exp2(constant * tl.minimum(spec.T - start, CHUNKS * spec.CHUNK).to(tl.float32))
    chunk = segment * CHUNKS + tl.arange(0, PADDED)
    valid = (tl.arange(0, PADDED) < CHUNKS) & (chunk < spec.CHUNKS)
    # The last row of a chunk has the sum of its gates.
    at = (chunk * spec.CHUNK + (spec.CHUNK - 1)) * spec.WIDTH
    if spec.WIDTH == 1:
        return tl.exp2(tl.sum(tl.load(base + at, mask=valid, other=0.0), 0))
    else:
        inside = valid[:, None] & (channels < spec.K)[None, :]
        return tl.exp2(tl.sum(tl.load(base + (at[:, None] + channels[None, :]), mask=inside, other=0.0), 0))


@triton.jit
def decayed_initial_states_kernel(
    ends,
    gates,
    first,
    starts,
    spec: tl.constexpr,
    per: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SUB_SEGMENTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Computes the initial states of segments with SUB_SEGMENTS sub-segments each, without the delta rule.

    See `forward.decayed_initial_states`.
    """
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    CHUNKS: tl.constexpr = spec.PER_SEQUENCE // SUB_SEGMENTS
    program = tl.program_id(0)
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    k_start = (program % K_TILES) * BLOCK_K
    program = program // K_TILES
    head = program % spec.H
    row = program // spec.H
    channels = k_start + tl.arange(0, BLOCK_K)
    size: tl.constexpr = spec.K * spec.V
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FIRST:
        from_row = tl.cast(row // per.FIRST, tl.int64) * spec.H + head
        acc = load_state(first + from_row * size, k_start, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    g_base = gates_base(gates, row, head, 0, spec, per)
    constant = constant_gate(gates, row, head, spec, per)
    length = 0
    if spec.CONSTANT:
        length = constant_effective_length(constant, spec)
    # Unrolled, so that no load waits for the state.
    for step in tl.static_range(0, SEGMENTS):
        segment = SEGMENTS - 1 - step if REVERSE else step
        to = (tl.cast(row, tl.int64) * SEGMENTS + segment) * spec.H + head
        store_state(starts + to * size, acc, k_start, v_start, spec)
        if step < SEGMENTS - 1:
            for n in tl.static_range(0, SUB_SEGMENTS):
                sub_segment = segment * SUB_SEGMENTS + (SUB_SEGMENTS - 1 - n if REVERSE else n)
                # No segment starts after the last one, in reverse before the first one: neither was scanned.
                index = sub_segment - SUB_SEGMENTS if REVERSE else sub_segment
                at = (tl.cast(row, tl.int64) * ((SEGMENTS - 1) * SUB_SEGMENTS) + index) * spec.H + head
                if spec.WIDTH == 1:
                    acc *= decay_of(g_base, constant, sub_segment, channels, spec, CHUNKS, PADDED)
                if spec.WIDTH > 1:
                    acc *= decay_of(g_base, constant, sub_segment, channels, spec, CHUNKS, PADDED)[:, None]
                if spec.CONSTANT:
                    # The scan stored nothing for sub-segments that decay to nothing before the segment's end.
                    limit = tl.where((SUB_SEGMENTS - 1 - n) * CHUNKS < length, spec.K, 0)
                    columns = v_start + tl.arange(0, BLOCK_V)
                    inside = (channels < limit)[:, None] & (columns < spec.V)[None, :]
                    at_tile = ends + at * size + (channels[:, None] * spec.V + columns[None, :])
                    acc += tl.load(at_tile, mask=inside, other=0.0)
                else:
                    acc += load_state(ends + at * size, k_start, v_start, BLOCK_K, BLOCK_V, spec)
