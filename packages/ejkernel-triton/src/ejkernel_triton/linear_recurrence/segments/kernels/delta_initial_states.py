"""Computes the initial states of the segments of a long row with the delta rule; see `decayed_initial_states`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import load_state, store_state


@triton.jit
def delta_initial_states_kernel(
    ends,
    transitions,
    first,
    used,
    starts,
    spec: tl.constexpr,
    per: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ENDS: tl.constexpr,
    TRANSITIONS: tl.constexpr,
    END_COLUMNS: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Computes the states at the start of SEGMENTS segments of a row, BLOCK_V value channels of one head.

    Transitions are the columns from V on of [rows, TRANSITIONS, H, K, V + K]. Ends are those of ENDS segments from
    segment SKIPPED on. See `forward.delta_initial_states`.
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
    for step in tl.range(0, SEGMENTS, num_stages=1):
        segment = SEGMENTS - 1 - step if REVERSE else step
        to = starts + ((tl.cast(row, tl.int64) * SEGMENTS + segment) * spec.H + head) * (spec.K * spec.V)
        store_state(to, acc, 0, v_start, spec)
        index = segment - SKIPPED
        if (index >= 0) & (index < ENDS):
            tl.debug_barrier()  # other threads wrote the rows of the state that a thread reads
            at = ends + ((tl.cast(row, tl.int64) * ENDS + index) * spec.H + head) * (spec.K * END_COLUMNS)
            inside = (i < spec.K)[:, None] & (columns < spec.V)[None, :]
            acc = tl.load(at + (i[:, None] * END_COLUMNS + columns[None, :]), mask=inside, other=0.0)
            m_base = transitions + ((tl.cast(row, tl.int64) * TRANSITIONS + segment) * spec.H + head) * (spec.K * WIDTH)
            # A segment that no state passes through has no transition.
            columns_left = spec.K
            if SOME:
                columns_left = tl.load(used + ((row * TRANSITIONS + segment) * spec.H + head)) * spec.K
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
