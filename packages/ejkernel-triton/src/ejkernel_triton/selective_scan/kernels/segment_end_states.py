"""Computes final states of the segments of a sequence, each from zeros; see `selective_scan_fwd`."""

import triton
import triton.language as tl

from ejkernel_triton.selective_scan.kernels.tile import (
    load_b_or_c,
    load_state,
    load_tokens,
    locate_program,
    store_state,
    tile_channels,
    zero_channel_vector,
    zero_state_tile,
)


@triton.jit
def load_directional_b_or_c(b_or_c, token, i: tl.constexpr, REVERSE: tl.constexpr, spec: tl.constexpr):
    """Returns the column of the ith token of a block in the direction of the scan."""
    if REVERSE:
        return load_b_or_c(b_or_c, token + (spec.BLOCK_T - 1 - i), spec.T, spec)
    else:
        return load_b_or_c(b_or_c, token + i, spec.T, spec)


@triton.jit
def segment_end_states_kernel(
    dt_array,
    decay,
    b_or_c,
    x_or_cotangent,
    end_states,
    dt_sums,
    REVERSE: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes every segment's final state from zeros, [B, NUM_SEGMENTS, N, E], and its sum of dt, [B, NUM_SEGMENTS,
    E].

    Forward, `b_or_c` is B and `x_or_cotangent` is x, and dt x B is added to the states. In REVERSE, `b_or_c` is C and
    `x_or_cotangent` is dy, and dy C is added to the cotangents of the states before they decay.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    row, segment, tile = locate_program(tl.program_id(0), spec)
    channels = tile_channels(tile, spec)
    x_or_cotangent, dt_array = (
        x_or_cotangent + (row // per.X_OR_COTANGENT) * (spec.T * spec.E),
        dt_array + (row // per.DT_ARRAY) * (spec.T * spec.E),
    )
    b_or_c = b_or_c + (row // per.B_OR_C) * (spec.T * spec.N)
    decay_rates = load_state(decay + (row // per.DECAY) * (spec.N * spec.E), channels, spec)
    state = zero_state_tile(spec)
    step_sum = zero_channel_vector(spec)
    first_token = segment * (spec.INTERVALS_PER_SEGMENT * spec.TOKENS_PER_INTERVAL)
    blocks = tl.cdiv(tl.minimum(spec.INTERVALS_PER_SEGMENT * spec.TOKENS_PER_INTERVAL, spec.T - first_token), BLOCK_T)
    # In reverse the partial block comes first: its tokens after T have dt and values of 0 and change nothing.
    stride = -BLOCK_T if REVERSE else BLOCK_T
    token = first_token + (blocks - 1) * BLOCK_T if REVERSE else first_token
    token_values = load_tokens(x_or_cotangent, token, spec.T, channels, spec)
    steps = load_tokens(dt_array, token, spec.T, channels, spec)
    for _ in tl.range(0, blocks):
        next_token = token + stride
        next_values, next_steps = (
            load_tokens(x_or_cotangent, next_token, spec.T, channels, spec),
            load_tokens(dt_array, next_token, spec.T, channels, spec),
        )
        columns = (
            load_directional_b_or_c(b_or_c, token, 0, REVERSE, spec),
            load_directional_b_or_c(b_or_c, token, 1, REVERSE, spec),
        )
        tl.debug_barrier()
        for i in tl.static_range(BLOCK_T):
            if i + 2 < BLOCK_T:
                columns += (load_directional_b_or_c(b_or_c, token, i + 2, REVERSE, spec),)
                tl.debug_barrier()
            if REVERSE:
                dt, value = steps[BLOCK_T - 1 - i].to(tl.float32), token_values[BLOCK_T - 1 - i].to(tl.float32)
                # The cotangent gets its token's share before it decays, since it is passed to the previous token.
                state = tl.exp2(decay_rates * dt[None, :]) * (state + columns[i][:, None] * value[None, :])
            else:
                dt, value = steps[i].to(tl.float32), token_values[i].to(tl.float32)
                state = tl.exp2(decay_rates * dt[None, :]) * state + columns[i][:, None] * (dt * value)[None, :]
            # exp(A dt) over all tokens is exp(A * sum of dt): [E] elements per segment instead of [N, E].
            step_sum += dt
        token_values, steps, token = next_values, next_steps, next_token
    at = row * spec.NUM_SEGMENTS + segment
    store_state(end_states + at * (spec.N * spec.E), channels, state, spec)
    tl.store(dt_sums + at * spec.E + channels, step_sum, mask=channels < spec.E)
