"""The backward selective scan: recomputes states forwards, and propagates their cotangents backwards.

    interval, from its state in memory:
        1. forwards over its tokens; the states before every block are stored in scratch, which stays in L2
        2. for every block, the last first:
             forwards:  h before each of its BLOCK_T tokens, in registers
             backwards: G = a g, the cotangent for the previous token, and all gradients

    g_t = G_{t+1} + C_t dy_t        dx = dt sum_n g B + D dy     dB = sum over channels of g dt x
    G_t = a_t g_t                   ddt = x sum_n g B            dC = sum over channels of dy h_t
    a_t = exp(dt A)                       + sum_n A G h_{t-1}    dA = sum over tokens of dt G h_{t-1}

Recovering h_{t-1} by a division by a_t would save an exponential, but lose all digits where a_t is small.

Sums over a program's channels exchange halves between lanes (`sum_lanes`). Programs store their sums, and XLA adds them
up in a fixed order: without atomics, results are reproducible bit for bit.

Source: Gu & Dao 2023, arXiv:2312.00752.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2, zero_padding_outputs
from ejkernel_triton.selective_scan.kernels.tile import (
    load_b_or_c,
    load_boundary_state,
    load_sequence_range,
    load_state,
    load_tokens,
    locate_program,
    locate_segment,
    store_state,
    store_tokens,
    tile_channels,
    zero_channel_vector,
    zero_state_tile,
)


@triton.jit
def add_lane_pairs(low, high, LANE_DISTANCE: tl.constexpr, LANES: tl.constexpr):
    """Adds pairs of lanes of low and of high, [..., LANES]; each lane keeps one of the two sums, by bit LANE_DISTANCE
    of its index.

    The lane whose index differs in that bit keeps the other one.
    """
    lane = tl.arange(0, LANES)[None, None, :]
    upper = (lane & LANE_DISTANCE) != 0
    # Each lane keeps half and sends half, so a shuffle transfers terms of two sums.
    kept_values, sent_values = tl.where(upper, high, low), tl.where(upper, low, high)
    return kept_values + tl.gather(sent_values, tl.broadcast_to(lane ^ LANE_DISTANCE, sent_values.shape), 2)


@triton.jit
def sum_lanes(p, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sums every ROWS lanes of each row of [G, ROWS, LANES]: [G, 1, LANES], where lane l has row l % ROWS.

    Each level exchanges half of the remaining rows, so all levels take ROWS - 1 shuffles instead of ROWS log2(ROWS).
    """
    for level in tl.static_range(7):
        if ROWS >> (level + 1) >= 1:
            p = reduce_to_half_rows(p, ROWS >> (level + 1), LANES)
    return p


@triton.jit
def reduce_to_half_rows(p, LANE_DISTANCE: tl.constexpr, LANES: tl.constexpr):
    """Reduces [G, 2 LANE_DISTANCE, LANES] to [G, LANE_DISTANCE, LANES]."""
    row_halves = tl.reshape(p, [p.shape[0], 2, LANE_DISTANCE, LANES])
    low, high = tl.split(tl.permute(row_halves, (0, 2, 3, 1)))
    return add_lane_pairs(low, high, LANE_DISTANCE, LANES)


@triton.jit
def sum_channels(b_terms, c_terms, spec: tl.constexpr):
    """Sums [BN, BLOCK_E] terms of dB and of dC of a token over the program's channels.

    Returns:
        [1, 1, BLOCK_E], where lane % (2 BN) counts dB and then dC; or, if there are more sums than lanes, a pair of [BN
        / BLOCK_E, 1, BLOCK_E].
    """
    BN: tl.constexpr = spec.BN
    LANES: tl.constexpr = spec.BLOCK_E
    if 2 * BN <= LANES:
        # dB and dC fill one half of the lanes each, so that both are summed by the same shuffles: 31 per token with 32
        # channels and N 16, instead of the 160 of a reduction (docs/lab/selective_scan_gpu.md).
        sums = add_lane_pairs(tl.reshape(b_terms, [1, BN, LANES]), tl.reshape(c_terms, [1, BN, LANES]), BN, LANES)
        sums = sum_lanes(sums, BN, LANES)
        lane = tl.arange(0, LANES)
        for level in tl.static_range(7):
            if (2 * BN) << level < LANES:  # lanes that are 2 BN apart hold terms of the same sum
                sums += tl.gather(sums, tl.broadcast_to((lane ^ ((2 * BN) << level))[None, None, :], sums.shape), 2)
        return sums
    else:
        SUMS_PER_LANE: tl.constexpr = BN // LANES
        # More sums than lanes: a lane ends with SUMS_PER_LANE sums of dB, and as many of dC.
        b_sums = sum_lanes(tl.reshape(b_terms, [SUMS_PER_LANE, LANES, LANES]), LANES, LANES)
        return b_sums, sum_lanes(tl.reshape(c_terms, [SUMS_PER_LANE, LANES, LANES]), LANES, LANES)


@triton.jit
def store_token_sums(partial_sums, token, end, channel_sums, spec: tl.constexpr):
    """Stores the sums of a token from `sum_channels`."""
    BN: tl.constexpr = spec.BN
    LANES: tl.constexpr = spec.BLOCK_E
    at = partial_sums + tl.cast(token, tl.int64) * (2 * BN)
    lane = tl.arange(0, LANES)
    # Each program writes its own [T, 2 BN]; XLA adds up the programs in a fixed order.
    mask = token + 0 * lane < end
    if 2 * BN <= LANES:
        tl.store(at + lane, tl.reshape(channel_sums, [LANES]), mask=mask & (lane < 2 * BN))
    else:
        SUMS_PER_LANE: tl.constexpr = BN // LANES
        b_sums, c_sums = channel_sums
        row = tl.arange(0, SUMS_PER_LANE)[:, None] * LANES + lane[None, :]
        tl.store(at + row, tl.reshape(b_sums, [SUMS_PER_LANE, LANES]), mask=mask[None, :])
        tl.store(at + BN + row, tl.reshape(c_sums, [SUMS_PER_LANE, LANES]), mask=mask[None, :])


@triton.jit
def recompute_states(
    x, dt_array, decay_rates, b_array, state, scratch, first_token, num_blocks, end, channels, spec: tl.constexpr
):
    """Recomputes the states of an interval, and stores those before each of its `num_blocks` blocks in the scratch."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    xs, steps = (
        load_tokens(x, first_token, end, channels, spec),
        load_tokens(dt_array, first_token, end, channels, spec),
    )
    columns = load_block_b_or_c(b_array, first_token, end, spec)
    for block in tl.range(0, num_blocks):
        # Stores only the states before blocks: the states of every token of an interval would not fit the registers.
        store_state_to_scratch(scratch, block, state, channels, spec)
        token = first_token + block * BLOCK_T
        next_token = token + BLOCK_T  # prefetched during the computation of this block
        next_xs, next_steps = (
            load_tokens(x, next_token, end, channels, spec),
            load_tokens(dt_array, next_token, end, channels, spec),
        )
        if spec.BC_PREFETCH_DISTANCE:
            # The loop also carries B of the next block. The last block reloads its own B, unmasked.
            next_columns = load_block_b_or_c(
                b_array, first_token + tl.minimum(block + 1, num_blocks - 1) * BLOCK_T, end, spec
            )
        else:
            columns = load_block_b_or_c(b_array, token, end, spec)
            next_columns = columns
        # The barrier keeps loads from sinking to their use, where every token would wait for memory.
        tl.debug_barrier()
        for i in tl.static_range(BLOCK_T):
            state = next_state(state, xs[i].to(tl.float32), steps[i].to(tl.float32), decay_rates, columns[i])
        xs, steps, columns = next_xs, next_steps, next_columns


@triton.jit
def load_x_dt_dy(x, dt_array, cotangent, token, end, channels, spec: tl.constexpr):
    """Returns x, dt and dy of a block of tokens."""
    xs, steps = load_tokens(x, token, end, channels, spec), load_tokens(dt_array, token, end, channels, spec)
    return xs, steps, load_tokens(cotangent, token, end, channels, spec)


@triton.jit
def load_block_b_or_c(base, token, end, spec: tl.constexpr):
    """Returns the columns of a block of tokens."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    columns = ()
    for i in tl.static_range(BLOCK_T):
        columns += (load_b_or_c(base, token + i, end, spec),)
    return columns


@triton.jit
def next_state(state, x_value, dt, decay_rates, b):
    """Returns the states after a token."""
    return tl.exp2(decay_rates * dt[None, :]) * state + b[:, None] * (dt * x_value)[None, :]


@triton.jit
def store_state_to_scratch(scratch, block, state, channels, spec: tl.constexpr):
    """Stores a tile of states as block number `block` of the program's scratch."""
    n = tl.arange(0, spec.BN)[:, None]
    tl.store(scratch + block * (spec.BN * spec.BLOCK_E) + n * spec.BLOCK_E + channels[None, :], state)


@triton.jit
def load_state_from_scratch(scratch, block, channels, spec: tl.constexpr):
    """Loads a tile of states that `store_state_to_scratch` stored."""
    n = tl.arange(0, spec.BN)[:, None]
    return tl.load(scratch + block * (spec.BN * spec.BLOCK_E) + n * spec.BLOCK_E + channels[None, :])


@triton.jit
def selective_scan_bwd_kernel(
    x,
    dt_array,
    decay,
    b_array,
    c_array,
    skip,
    states,
    cotangent,
    segment_end_cotangents,
    cu_seqlens,
    first_intervals,
    dx,
    ddt_array,
    partial_sums,
    ddecay,
    dskip,
    dinitial_states,
    scratch,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes all gradients of a segment of the sequence, for the channels of a program; see the top.

    `segment_end_cotangents` [B, NUM_SEGMENTS, N, E] are the cotangents of the states after every segment.
    `partial_sums` [B, NUM_CHANNEL_TILES, T, 2 BN] are dB and dC summed over the program's channels, `ddecay`
    [B, NUM_SEGMENTS, N, E] and `dskip` [B, NUM_SEGMENTS, E] sums over its tokens, `dinitial_states` [B, N, E] the
    cotangents of the initial states. Packed sequences are segments, as in `selective_scan_fwd_kernel`.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    program = tl.program_id(0)
    row, segment, tile = locate_program(program, spec)
    channels = tile_channels(tile, spec)
    x, dt_array = x + (row // per.X) * (spec.T * spec.E), dt_array + (row // per.DT_ARRAY) * (spec.T * spec.E)
    dx, ddt_array = dx + row * (spec.T * spec.E), ddt_array + row * (spec.T * spec.E)
    cotangent = cotangent + (row // per.COTANGENT) * (spec.T * spec.E)
    b_array, c_array = (
        b_array + (row // per.B_ARRAY) * (spec.T * spec.N),
        c_array + (row // per.C_ARRAY) * (spec.T * spec.N),
    )
    states = states + (row // per.STATES) * (spec.NUM_INTERVALS * spec.N * spec.E)
    partial_sums = partial_sums + (row * spec.NUM_CHANNEL_TILES + tile) * (spec.T * 2 * spec.BN)
    scratch = scratch + tl.cast(program, tl.int64) * (spec.TOKENS_PER_INTERVAL // spec.BLOCK_T * spec.BN * spec.BLOCK_E)
    scratch -= tile * spec.BLOCK_E  # the scratch is indexed by the program's channels
    decay_rates = load_state(decay + (row // per.DECAY) * (spec.N * spec.E), channels, spec)
    skip_weights = tl.load(skip + (row // per.SKIP) * spec.E + channels, mask=channels < spec.E, other=0.0)
    segment_end_cotangents = segment_end_cotangents + (row // per.SEGMENT_END_COTANGENTS) * (
        spec.NUM_SEGMENTS * spec.N * spec.E
    )
    # The cotangent of the states after the remaining tokens, which stays in registers through all intervals.
    state_cotangent = load_boundary_state(segment_end_cotangents, segment, channels, True, spec)
    decay_gradient_acc = zero_state_tile(spec)
    skip_gradient_acc = zero_channel_vector(spec)
    if spec.IS_PACKED:
        cu_seqlens = cu_seqlens + (row // per.CU_SEQLENS) * (spec.NUM_SEGMENTS + 1)
        start_token, end, first_interval = load_sequence_range(
            cu_seqlens, first_intervals + (row // per.FIRST_INTERVALS) * (spec.NUM_SEGMENTS + 1), segment
        )
    else:
        start_token, end, first_interval = locate_segment(segment, spec)
    states = states + tl.cast(first_interval, tl.int64) * (spec.N * spec.E)
    chunks = tl.cdiv(end - start_token, spec.TOKENS_PER_INTERVAL)
    for reverse_index in tl.range(0, chunks):
        interval = chunks - 1 - reverse_index
        first_token = start_token + interval * spec.TOKENS_PER_INTERVAL
        num_blocks = tl.cdiv(tl.minimum(spec.TOKENS_PER_INTERVAL, end - first_token), spec.BLOCK_T)
        # The state that the forward pass stored: before the interval's first token.
        state = load_state(states + tl.cast(interval, tl.int64) * (spec.N * spec.E), channels, spec)
        recompute_states(
            x, dt_array, decay_rates, b_array, state, scratch, first_token, num_blocks, end, channels, spec
        )
        tl.debug_barrier()  # threads read scratch elements that others wrote
        # The first block's operands; without PREFETCH_TOKEN_BLOCKS nothing reads them, and the compiler drops the
        # loads.
        tokens = load_x_dt_dy(x, dt_array, cotangent, first_token + (num_blocks - 1) * BLOCK_T, end, channels, spec)
        state = load_state_from_scratch(scratch, num_blocks - 1, channels, spec)
        for reverse_block in tl.range(0, num_blocks):
            block = num_blocks - 1 - reverse_block
            token = first_token + block * spec.BLOCK_T
            state_before_block = (
                state if spec.PREFETCH_STATES else load_state_from_scratch(scratch, block, channels, spec)
            )
            # The next block's states, loaded during this block's arithmetic; the first block reloads its own.
            if spec.PREFETCH_STATES:
                state = load_state_from_scratch(scratch, tl.maximum(block - 1, 0), channels, spec)
            if spec.PREFETCH_TOKEN_BLOCKS:
                xs, steps, dys = tokens
                tokens = load_x_dt_dy(x, dt_array, cotangent, token - BLOCK_T, end, channels, spec)
            else:
                xs, steps, dys = load_x_dt_dy(x, dt_array, cotangent, token, end, channels, spec)
            # The barrier keeps the compiler from interleaving loads and arithmetic, which spills registers.
            columns = load_block_b_or_c(b_array, token, end, spec)
            tl.debug_barrier()
            # Forwards: BLOCK_T + 1 tiles of states in registers, the one before each token and the last one after.
            token_states = (state_before_block,)
            for i in tl.static_range(BLOCK_T):
                x_value, dt = xs[i].to(tl.float32), steps[i].to(tl.float32)
                token_states += (next_state(token_states[i], x_value, dt, decay_rates, columns[i]),)
            # Scans backwards over the same tokens.
            dxs, step_gradients, sums = (), (), ()
            for j in tl.static_range(BLOCK_T):
                x_value, dt = xs[BLOCK_T - 1 - j].to(tl.float32), steps[BLOCK_T - 1 - j].to(tl.float32)
                dy, at = dys[BLOCK_T - 1 - j].to(tl.float32), token + (BLOCK_T - 1 - j)
                # B is reloaded from L1: kept since the forward loop it would take registers.
                b, c = load_b_or_c(b_array, at, end, spec)[:, None], load_b_or_c(c_array, at, end, spec)[:, None]
                g = state_cotangent + c * dy[None, :]
                state_cotangent = tl.exp2(decay_rates * dt[None, :]) * g
                # a g h_{t-1}: the gradient of the exponent dt A; times dt it is dA's term, times A ddt's.
                exponent_gradient = state_cotangent * token_states[BLOCK_T - 1 - j]
                decay_gradient_acc += exponent_gradient * dt[None, :]
                x_gradient_terms = tl.sum(g * b, 0)
                dxs += (x_gradient_terms * dt + skip_weights * dy,)
                # `decay_rates` is A log2(e), so the gradient is multiplied by LN2.
                step_gradients += (x_gradient_terms * x_value + tl.sum(exponent_gradient * decay_rates, 0) * LN2,)
                skip_gradient_acc += dy * x_value
                sums += (sum_channels(g * (dt * x_value)[None, :], token_states[BLOCK_T - j] * dy[None, :], spec),)
            # After the loop: tokens from `end` on are masked here, and with dy and dt of 0 `state_cotangent` passes
            # through unchanged.
            for j in tl.static_range(BLOCK_T):
                store_token_sums(partial_sums, token + (BLOCK_T - 1 - j), end, sums[j], spec)
            store_tokens(dx, token, end, channels, dxs, True, spec)
            store_tokens(ddt_array, token, end, channels, step_gradients, True, spec)
        # All reads of the scratch come before the next interval overwrites it.
        tl.debug_barrier()
    segment_row = row * spec.NUM_SEGMENTS + segment
    store_state(ddecay + segment_row * (spec.N * spec.E), channels, decay_gradient_acc, spec)
    tl.store(dskip + segment_row * spec.E + channels, skip_gradient_acc, mask=channels < spec.E)
    if spec.IS_PACKED:
        store_state(dinitial_states + segment_row * (spec.N * spec.E), channels, state_cotangent, spec)
        zero_padding_outputs(dx, cu_seqlens, segment, channels, spec.NUM_SEGMENTS, spec.T, spec.E, spec.E)
        zero_padding_outputs(ddt_array, cu_seqlens, segment, channels, spec.NUM_SEGMENTS, spec.T, spec.E, spec.E)
        zero_padding_outputs(
            partial_sums,
            cu_seqlens,
            segment,
            tl.arange(0, 2 * spec.BN),
            spec.NUM_SEGMENTS,
            spec.T,
            2 * spec.BN,
            2 * spec.BN,
        )
    elif segment == 0:
        store_state(dinitial_states + row * (spec.N * spec.E), channels, state_cotangent, spec)
