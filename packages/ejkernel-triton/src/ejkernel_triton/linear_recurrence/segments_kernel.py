# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Where the segments of a long row begin, from where walks of them from zeros end.

    segments     |   0   |   1   |   2   |   3   |
    ends         N0      N1      N2                   walks from zeros, all at the same time (`states_kernel`)
    starts       S0      S1 = N0 + M0 S0    S2 = N1 + M1 S1    S3 = N2 + M2 S2

M is what a segment does to the state that it begins with: a factor of key channels, or a matrix with the delta rule.
In reverse, gradients of states go from the last segment to the first, by the transpose of M.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.reach_kernel import constant_reach
from ejkernel_triton.linear_recurrence.tile import constant_gate, gates_base, load_state, store_state


@triton.jit
def decay_of(base, constant, segment, channels, spec: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """The factor on the state that passes through CHUNKS chunks of a segment: [channels], or a number."""
    if spec.CONSTANT:
        start = segment * CHUNKS * spec.CHUNK
        return tl.exp2(constant * tl.minimum(spec.T - start, CHUNKS * spec.CHUNK).to(tl.float32))
    chunk = segment * CHUNKS + tl.arange(0, PADDED)
    valid = (tl.arange(0, PADDED) < CHUNKS) & (chunk < spec.CHUNKS)
    # The last row of a chunk is the sum of its gates.
    at = (chunk * spec.CHUNK + (spec.CHUNK - 1)) * spec.WIDTH
    if spec.WIDTH == 1:
        return tl.exp2(tl.sum(tl.load(base + at, mask=valid, other=0.0), 0))
    else:
        inside = valid[:, None] & (channels < spec.K)[None, :]
        return tl.exp2(tl.sum(tl.load(base + (at[:, None] + channels[None, :]), mask=inside, other=0.0), 0))


@triton.jit
def decayed_starts_kernel(
    ends,
    gates,
    first,
    starts,
    spec: tl.constexpr,
    per: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Starts of segments that were walked in PARTS parts each, without the delta rule; see `decayed_starts`."""
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    CHUNKS: tl.constexpr = spec.PER_SEQUENCE // PARTS
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
    reach = 0
    if spec.CONSTANT:
        reach = constant_reach(constant, spec)
    # Unrolled: no load waits for the state.
    for step in tl.static_range(0, SEGMENTS):
        segment = SEGMENTS - 1 - step if REVERSE else step
        to = (tl.cast(row, tl.int64) * SEGMENTS + segment) * spec.H + head
        store_state(starts + to * size, acc, k_start, v_start, spec)
        if step < SEGMENTS - 1:
            for n in tl.static_range(0, PARTS):
                part = segment * PARTS + (PARTS - 1 - n if REVERSE else n)
                # Behind the last segment no other begins, in reverse before the first one: neither was walked.
                walked = part - PARTS if REVERSE else part
                at = (tl.cast(row, tl.int64) * ((SEGMENTS - 1) * PARTS) + walked) * spec.H + head
                if spec.WIDTH == 1:
                    acc *= decay_of(g_base, constant, part, channels, spec, CHUNKS, PADDED)
                if spec.WIDTH > 1:
                    acc *= decay_of(g_base, constant, part, channels, spec, CHUNKS, PADDED)[:, None]
                if spec.CONSTANT:
                    # The walk stored nothing for parts of which nothing is left where the segment ends.
                    limit = tl.where((PARTS - 1 - n) * CHUNKS < reach, spec.K, 0)
                    columns = v_start + tl.arange(0, BLOCK_V)
                    inside = (channels < limit)[:, None] & (columns < spec.V)[None, :]
                    at_tile = ends + at * size + (channels[:, None] * spec.V + columns[None, :])
                    acc += tl.load(at_tile, mask=inside, other=0.0)
                else:
                    acc += load_state(ends + at * size, k_start, v_start, BLOCK_K, BLOCK_V, spec)


@triton.jit
def delta_starts_kernel(
    ends,
    transitions,
    first,
    used,
    starts,
    spec: tl.constexpr,
    per: tl.constexpr,
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    WALKED: tl.constexpr,
    END_COLUMNS: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Starts of PARTS parts of a row with the delta rule, BLOCK_V value channels of one head; see `delta_starts`.

    Transitions are the columns from V on of [rows, WALKED, H, K, V + K]. Ends are those of ENDS parts, of which the
    first has the number SKIPPED.
    """
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    WIDTH: tl.constexpr = spec.V + spec.K
    program = tl.program_id(0)
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    head = program % spec.H
    row = program // spec.H
    i = tl.arange(0, BLOCK_K)
    columns = v_start + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FIRST:
        from_row = tl.cast(row // per.FIRST, tl.int64) * spec.H + head
        acc = load_state(first + from_row * (spec.K * spec.V), 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    for step in tl.range(0, PARTS, num_stages=1):
        part = PARTS - 1 - step if REVERSE else step
        to = starts + ((tl.cast(row, tl.int64) * PARTS + part) * spec.H + head) * (spec.K * spec.V)
        store_state(to, acc, 0, v_start, spec)
        walked = part - SKIPPED
        if (walked >= 0) & (walked < ENDS):
            tl.debug_barrier()  # other threads wrote the rows of the state that a thread reads
            at = ends + ((tl.cast(row, tl.int64) * ENDS + walked) * spec.H + head) * (spec.K * END_COLUMNS)
            inside = (i < spec.K)[:, None] & (columns < spec.V)[None, :]
            acc = tl.load(at + (i[:, None] * END_COLUMNS + columns[None, :]), mask=inside, other=0.0)
            m_base = transitions + ((tl.cast(row, tl.int64) * WALKED + part) * spec.H + head) * (spec.K * WIDTH)
            # A part that nothing passes through has no transition.
            columns_left = spec.K
            if SOME:
                columns_left = tl.load(used + ((row * WALKED + part) * spec.H + head)) * spec.K
            for j_start in tl.range(0, columns_left, BLOCK_J):
                j = j_start + tl.arange(0, BLOCK_J)
                valid = (i < spec.K)[:, None] & (j < spec.K)[None, :]
                if REVERSE:
                    matrix = tl.load(m_base + spec.V + (j[None, :] * WIDTH + i[:, None]), mask=valid, other=0.0)
                else:
                    matrix = tl.load(m_base + spec.V + (i[:, None] * WIDTH + j[None, :]), mask=valid, other=0.0)
                state = load_state(to, j_start, v_start, BLOCK_J, BLOCK_V, spec)
                acc = add_dot(acc, matrix, state, spec)
            tl.debug_barrier()  # all threads have read the state before the next is stored
