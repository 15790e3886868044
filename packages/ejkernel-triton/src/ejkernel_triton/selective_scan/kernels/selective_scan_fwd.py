"""The forward selective scan, in one pass, or over segments of the sequence in parallel.

    tokens    |--- interval ---|--- interval ---|--- interval ---| ...
    states    s0               s1               s2                       stored: the backward pass starts from them
    tiles      [BLOCK_E]  x, dt  ->  h in registers  ->  y               read and written once

A program scans the tokens of one segment for BLOCK_E channels of one batch row. A thread holds the states of its
channels; B and C are shared by all of them. The bottleneck is the exponentials, one per state element and token: the
special function units compute 16 per clock and multiprocessor.

With one segment there is one pass. If there are too few channels to fill the chip, there are three:

    segment_end_states        each segment from zeros: its final state, and its sum of dt; one exponential per element
    XLA                   state passing between segments: a product with exp(A * sum of dt), and a sum
    selective_scan_fwd    all segments in parallel, each from its initial state

Source: Gu & Dao 2023, arXiv:2312.00752.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import zero_padding_outputs
from ejkernel_triton.selective_scan.kernels.tile import (
    load_b_and_c,
    load_boundary_state,
    load_sequence_range,
    load_state,
    load_tokens,
    locate_program,
    locate_segment,
    store_state,
    store_tokens,
    tile_channels,
)


@triton.jit
def store_interval_state(states, offset, channels, state, spec: tl.constexpr):
    """Stores the state before a token that starts an interval; `offset` is the token's offset in its segment."""
    # TOKENS_PER_INTERVAL is a multiple of BLOCK_T, so only the first token of a block can start an interval.
    if offset % spec.TOKENS_PER_INTERVAL == 0:
        store_state(
            states + tl.cast(offset // spec.TOKENS_PER_INTERVAL, tl.int64) * (spec.N * spec.E), channels, state, spec
        )


@triton.jit
def update_and_read_state(state, x, dt, decay_rates, columns, skip_weights):
    """Returns the states after a token, and its output."""
    b, c = columns
    x_value, dt = x.to(tl.float32), dt.to(tl.float32)
    # `decay_rates` includes log2(e), which saves a product per exponential. Padding rows of the state, and tokens
    # after T, have b, dt and x of 0, and leave the states unchanged.
    state = tl.exp2(decay_rates * dt[None, :]) * state + b[:, None] * (dt * x_value)[None, :]
    # A sum over a thread's registers: no shuffle.
    return state, tl.sum(state * c[:, None], 0) + skip_weights * x_value


@triton.jit
def scan_segment_tokens(
    x,
    dt_array,
    decay_rates,
    b_array,
    c_array,
    skip_weights,
    state,
    output,
    states,
    first_token,
    end,
    channels,
    spec: tl.constexpr,
):
    """Scans the tokens of a segment, and returns the states after it. B and C are loaded two tokens before their
    use.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    xs, steps = (
        load_tokens(x, first_token, end, channels, spec),
        load_tokens(dt_array, first_token, end, channels, spec),
    )
    for token in tl.range(first_token, end, BLOCK_T):
        store_interval_state(states, token - first_token, channels, state, spec)
        # Prefetch: the next block's tokens are loaded while this one's are computed. They are carried through the loop,
        # since the compiler sinks a load to the use of its value. For columns, barriers prevent that only in part.
        next_xs, next_steps = (
            load_tokens(x, token + BLOCK_T, end, channels, spec),
            load_tokens(dt_array, token + BLOCK_T, end, channels, spec),
        )
        columns = (
            load_b_and_c(b_array, c_array, token, end, spec),
            load_b_and_c(b_array, c_array, token + 1, end, spec),
        )
        tl.debug_barrier()
        # Stored once per block, so that no store is between the loads of a token and the arithmetic of the next.
        outputs = ()
        for i in tl.static_range(BLOCK_T):
            if i + 2 < BLOCK_T:
                columns += (load_b_and_c(b_array, c_array, token + i + 2, end, spec),)
                tl.debug_barrier()
            state, y = update_and_read_state(state, xs[i], steps[i], decay_rates, columns[i], skip_weights)
            outputs += (y,)
        store_tokens(output, token, end, channels, outputs, False, spec)
        xs, steps = next_xs, next_steps
    return state


@triton.jit
def scan_segment_prefetched(
    x,
    dt_array,
    decay_rates,
    b_array,
    c_array,
    skip_weights,
    state,
    output,
    states,
    first_token,
    end,
    channels,
    spec: tl.constexpr,
):
    """Like `scan_segment_tokens`, with B and C loaded PREFETCH_DISTANCE tokens before their use, and carried through
    the loop.

    A token's columns are loaded into the registers of those that were last used; with PREFETCH_DISTANCE = 2:

        token      t          t+1        t+2        t+3     ...
        use        slot 0     slot 1     slot 0     slot 1
        load            slot 0     slot 1     slot 0     slot 1

    So a load is issued PREFETCH_DISTANCE tokens before its use, and the compiler cannot sink it.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    PREFETCH_DISTANCE: tl.constexpr = spec.BC_PREFETCH_DISTANCE
    xs, steps = (
        load_tokens(x, first_token, end, channels, spec),
        load_tokens(dt_array, first_token, end, channels, spec),
    )
    columns = ()
    for i in tl.static_range(PREFETCH_DISTANCE):
        columns += (load_b_and_c(b_array, c_array, first_token + i, end, spec),)
    for token in tl.range(first_token, end, BLOCK_T):
        store_interval_state(states, token - first_token, channels, state, spec)
        next_token = token + BLOCK_T
        next_xs = load_tokens(x, next_token, end, channels, spec)
        next_steps = load_tokens(dt_array, next_token, end, channels, spec)
        # In the last block its own columns are reloaded, so that the loads need no mask.
        next_block = tl.where(next_token < end, next_token, token)
        column_registers, outputs = columns, ()
        for i in tl.static_range(BLOCK_T):
            state, y = update_and_read_state(state, xs[i], steps[i], decay_rates, column_registers[i], skip_weights)
            outputs += (y,)
            if i + PREFETCH_DISTANCE < BLOCK_T:
                column_registers += (load_b_and_c(b_array, c_array, token + (i + PREFETCH_DISTANCE), end, spec),)
            else:
                column_registers += (
                    load_b_and_c(b_array, c_array, next_block + (i + PREFETCH_DISTANCE - BLOCK_T), end, spec),
                )
            tl.debug_barrier()  # keeps the loads of a token from sinking to their use
        store_tokens(output, token, end, channels, outputs, False, spec)
        next_columns = ()
        for i in tl.static_range(PREFETCH_DISTANCE):
            next_columns += (column_registers[BLOCK_T + i],)
        xs, steps, columns = next_xs, next_steps, next_columns
    return state


@triton.jit
def selective_scan_fwd_kernel(
    x,
    dt_array,
    decay,
    b_array,
    c_array,
    skip,
    initial_states,
    cu_seqlens,
    first_intervals,
    output,
    states,
    final_states,
    HAS_INITIAL_STATES: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes output, states before every interval and final states; `decay` is A^T * log2(e), [N, E].

    `initial_states` [B, NUM_SEGMENTS, N, E] are the initial states of every segment, if HAS_INITIAL_STATES. Packed
    sequences are segments, too, with the tokens between their `cu_seqlens` and their first stored state at
    `first_intervals`; they are independent.
    """
    row, segment, tile = locate_program(tl.program_id(0), spec)
    channels = tile_channels(tile, spec)
    x, dt_array = x + (row // per.X) * (spec.T * spec.E), dt_array + (row // per.DT_ARRAY) * (spec.T * spec.E)
    output = output + row * (spec.T * spec.E)
    b_array, c_array = (
        b_array + (row // per.B_ARRAY) * (spec.T * spec.N),
        c_array + (row // per.C_ARRAY) * (spec.T * spec.N),
    )
    states = states + row * (spec.NUM_INTERVALS * spec.N * spec.E)
    # A^T and D stay in registers for the whole segment.
    decay_rates = load_state(decay + (row // per.DECAY) * (spec.N * spec.E), channels, spec)
    skip_weights = tl.load(skip + (row // per.SKIP) * spec.E + channels, mask=channels < spec.E, other=0.0)
    if HAS_INITIAL_STATES:
        initial_states = initial_states + (row // per.INITIAL_STATES) * (spec.NUM_SEGMENTS * spec.N * spec.E)
    state = load_boundary_state(initial_states, segment, channels, HAS_INITIAL_STATES, spec)
    if spec.IS_PACKED:
        cu_seqlens = cu_seqlens + (row // per.CU_SEQLENS) * (spec.NUM_SEGMENTS + 1)
        first_token, end, interval = load_sequence_range(
            cu_seqlens, first_intervals + (row // per.FIRST_INTERVALS) * (spec.NUM_SEGMENTS + 1), segment
        )
    else:
        first_token, end, interval = locate_segment(segment, spec)
    states = states + tl.cast(interval, tl.int64) * (spec.N * spec.E)
    if spec.BC_PREFETCH_DISTANCE:
        state = scan_segment_prefetched(
            x,
            dt_array,
            decay_rates,
            b_array,
            c_array,
            skip_weights,
            state,
            output,
            states,
            first_token,
            end,
            channels,
            spec,
        )
    else:
        state = scan_segment_tokens(
            x,
            dt_array,
            decay_rates,
            b_array,
            c_array,
            skip_weights,
            state,
            output,
            states,
            first_token,
            end,
            channels,
            spec,
        )
    if spec.IS_PACKED:
        store_state(final_states + (row * spec.NUM_SEGMENTS + segment) * (spec.N * spec.E), channels, state, spec)
        zero_padding_outputs(output, cu_seqlens, segment, channels, spec.NUM_SEGMENTS, spec.T, spec.E, spec.E)
    # Only the last segment's final state is an output of the scan.
    elif segment == spec.NUM_SEGMENTS - 1:
        store_state(final_states + row * (spec.N * spec.E), channels, state, spec)
