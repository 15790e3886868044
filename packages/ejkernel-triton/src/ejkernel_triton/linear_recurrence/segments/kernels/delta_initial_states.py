"""Computes the initial states of the segments of a long row with the delta rule; see `decayed_initial_states`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import load_state, store_state


@triton.jit
def delta_initial_states_kernel(
    end_states,
    transitions,
    initial_state,
    passes_state,
    initial_segment_states,
    spec: tl.constexpr,
    per: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    NUM_SCANS_WITH_FINAL_STATE: tl.constexpr,
    NUM_TRANSITIONS: tl.constexpr,
    END_STATE_COLUMNS: tl.constexpr,
    FIRST_SCANNED_SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_CONTRACTED_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_PASSES_STATE: tl.constexpr,
):
    """Computes the states at the start of NUM_SEGMENTS segments of a row, BLOCK_V value channels of one head.

    Transitions are the columns from V on of [rows, NUM_TRANSITIONS, H, K, V + K]. Ends are those of
    NUM_SCANS_WITH_FINAL_STATE segments from segment FIRST_SCANNED_SEGMENT on. See `forward.delta_initial_states`.
    """
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    TRANSITION_ROW_WIDTH: tl.constexpr = spec.V + spec.K
    program = tl.program_id(0)
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    head = program % spec.H
    row = program // spec.H
    i = tl.arange(0, BLOCK_K)
    columns = v_start + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL_STATE:
        state_row = tl.cast(row // per.INITIAL_STATE, tl.int64) * spec.H + head
        acc = load_state(initial_state + state_row * (spec.K * spec.V), 0, v_start, BLOCK_K, BLOCK_V, spec).to(
            tl.float32
        )
    for step in tl.range(0, NUM_SEGMENTS, num_stages=1):
        segment = NUM_SEGMENTS - 1 - step if REVERSE else step
        state_base = initial_segment_states + ((tl.cast(row, tl.int64) * NUM_SEGMENTS + segment) * spec.H + head) * (
            spec.K * spec.V
        )
        store_state(state_base, acc, 0, v_start, spec)
        scanned_index = segment - FIRST_SCANNED_SEGMENT
        if (scanned_index >= 0) & (scanned_index < NUM_SCANS_WITH_FINAL_STATE):
            tl.debug_barrier()  # other threads wrote the rows of the state that a thread reads
            at = end_states + (
                (tl.cast(row, tl.int64) * NUM_SCANS_WITH_FINAL_STATE + scanned_index) * spec.H + head
            ) * (spec.K * END_STATE_COLUMNS)
            in_bounds = (i < spec.K)[:, None] & (columns < spec.V)[None, :]
            acc = tl.load(at + (i[:, None] * END_STATE_COLUMNS + columns[None, :]), mask=in_bounds, other=0.0)
            transition_base = transitions + ((tl.cast(row, tl.int64) * NUM_TRANSITIONS + segment) * spec.H + head) * (
                spec.K * TRANSITION_ROW_WIDTH
            )
            # A segment that no state passes through has no transition.
            num_transition_columns = spec.K
            if HAS_PASSES_STATE:
                num_transition_columns = (
                    tl.load(passes_state + ((row * NUM_TRANSITIONS + segment) * spec.H + head)) * spec.K
                )
            for j_start in tl.range(0, num_transition_columns, BLOCK_CONTRACTED_K):
                j = j_start + tl.arange(0, BLOCK_CONTRACTED_K)
                valid = (i < spec.K)[:, None] & (j < spec.K)[None, :]
                if REVERSE:
                    transition = tl.load(
                        transition_base + spec.V + (j[None, :] * TRANSITION_ROW_WIDTH + i[:, None]),
                        mask=valid,
                        other=0.0,
                    )
                else:
                    transition = tl.load(
                        transition_base + spec.V + (i[:, None] * TRANSITION_ROW_WIDTH + j[None, :]),
                        mask=valid,
                        other=0.0,
                    )
                state = load_state(state_base, j_start, v_start, BLOCK_CONTRACTED_K, BLOCK_V, spec)
                acc = add_dot(acc, transition, state, spec)
            tl.debug_barrier()  # all threads have read the state before the next is stored
