"""The decode step of the selective scan: updates states in memory with a few tokens, reading and writing each state
once.

    states in HBM  [BLOCK_E, N] -- load --> registers ------------------------------> store, in place if donated
    A                           -- load --> registers
    tokens                          load 0 | load 1            | load 2 ...
                                           | decay, write,     | decay, write,
                                           | read, store 0     | read, store 1

A channel's N state elements are contiguous, so a tile is one range of memory, and sums over them stay in a few lanes of
a warp. Consecutive programs have the same channels of different sequences: they read A from the cache.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, batch_row_address, load_state_slot, load_token_range, zero_padding_outputs


@triton.jit
def load_token(x, dt_array, b_array, c_array, token, token_exists, channels, state_elements, spec: tl.constexpr):
    """Loads a token: x and dt by channel, B and C by state element; zeros for a missing token."""
    # Vectors instead of scalars: the interpreter has no & of a vector and a scalar.
    channel_mask = channels < tl.where(token_exists > 0, spec.E, 0)
    state_mask = state_elements < tl.where(token_exists > 0, spec.N, 0)
    return (
        tl.load(x + token * spec.E + channels, mask=channel_mask, other=0.0).to(tl.float32),
        tl.load(dt_array + token * spec.E + channels, mask=channel_mask, other=0.0).to(tl.float32),
        tl.load(b_array + token * spec.N + state_elements, mask=state_mask, other=0.0).to(tl.float32),
        tl.load(c_array + token * spec.N + state_elements, mask=state_mask, other=0.0).to(tl.float32),
    )


@triton.jit
def selective_state_update_kernel(
    x,
    dt_array,
    decay,
    b_array,
    c_array,
    skip,
    cu_seqlens,
    slots,
    initial_states,
    final_states,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes all tokens of one sequence for one tile of channels.

    In place, `final_states` has the initial states: a program reads its tile before it writes it, and no other program
    has it.
    """
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    program = tl.program_id(0)
    sequence = program % spec.NUM_SEQUENCES
    tile = program // spec.NUM_SEQUENCES % spec.NUM_CHANNEL_TILES
    row = tl.cast(program // (spec.NUM_SEQUENCES * spec.NUM_CHANNEL_TILES), tl.int64)
    channels, state_elements = tile * spec.BLOCK_E + tl.arange(0, spec.BLOCK_E), tl.arange(0, spec.BLOCK_N)
    at = channels[:, None] * spec.N + state_elements[None, :]
    in_bounds = (channels < spec.E)[:, None] & (state_elements < spec.N)[None, :]
    mask = in_bounds
    # 64 bits: a token's index times its stride may need more than 31.
    first = tl.cast(tile * 0, tl.int64)
    end = first + spec.T
    if spec.IS_PACKED:
        cu_seqlens = batch_row_address(cu_seqlens, row, per.CU_SEQLENS, spec.NUM_SEQUENCES + 1)
        first, end = load_token_range(cu_seqlens, sequence)
    state_index = tl.cast(sequence, tl.int64)
    if spec.NUM_SLOTS > 0:
        slots = batch_row_address(slots, row, per.SLOTS, spec.NUM_SEQUENCES)
        state_index, uses_slot = load_state_slot(slots, sequence, first, end, spec.NUM_SLOTS)
        mask = (channels < tl.where(uses_slot > 0, spec.E, 0))[:, None] & (state_elements < spec.N)[None, :]
    STATES: tl.constexpr = (spec.NUM_SLOTS if spec.NUM_SLOTS > 0 else spec.NUM_SEQUENCES) * spec.E * spec.N
    final_address = final_states + row * STATES + state_index * (spec.E * spec.N) + at
    # The state is loaded first, since it is most of the traffic.
    if spec.STATES_ARE_IN_PLACE:
        state = tl.load(final_address, mask=mask, other=0.0).to(tl.float32)
    elif spec.HAS_INITIAL_STATE:
        initial_address = (
            batch_row_address(initial_states, row, per.INITIAL_STATES, STATES) + state_index * (spec.E * spec.N) + at
        )
        state = tl.load(initial_address, mask=mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BLOCK_E, BLOCK_N], tl.float32)
    # The next sequence's program reads A again.
    decay_rates = batch_row_address(decay, row, per.DECAY, spec.E * spec.N) + at
    decay_rates = tl.load(decay_rates, mask=in_bounds, other=0.0, eviction_policy="evict_last")
    decay_rates = decay_rates.to(tl.float32) * LOG2E
    skip_weight = tl.load(batch_row_address(skip, row, per.SKIP, spec.E) + channels, mask=channels < spec.E, other=0.0)
    x, dt_array = (
        batch_row_address(x, row, per.X, spec.T * spec.E),
        batch_row_address(dt_array, row, per.DT_ARRAY, spec.T * spec.E),
    )
    b_array, c_array = (
        batch_row_address(b_array, row, per.B_ARRAY, spec.T * spec.N),
        batch_row_address(c_array, row, per.C_ARRAY, spec.T * spec.N),
    )
    output += row * spec.T * spec.E
    x_value, dt, b, c = load_token(
        x, dt_array, b_array, c_array, first, tl.cast(first < end, tl.int32), channels, state_elements, spec
    )
    for token in tl.range(first, end):
        # Issued before this token's arithmetic, which hides the latency.
        next_x, next_dt, next_b, next_c = load_token(
            x, dt_array, b_array, c_array, token + 1, tl.cast(token + 1 < end, tl.int32), channels, state_elements, spec
        )
        state = tl.exp2(decay_rates * dt[:, None]) * state + (dt * x_value)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + skip_weight.to(tl.float32) * x_value
        tl.store(output + token * spec.E + channels, y.to(output.dtype.element_ty), mask=channels < spec.E)
        x_value, dt, b, c = next_x, next_dt, next_b, next_c
    # In place, only this program read the tile, at the top.
    tl.store(final_address, state.to(final_states.dtype.element_ty), mask=mask)
    if spec.IS_PACKED:
        zero_padding_outputs(output, cu_seqlens, sequence, channels, spec.NUM_SEQUENCES, spec.T, spec.E, spec.E)
