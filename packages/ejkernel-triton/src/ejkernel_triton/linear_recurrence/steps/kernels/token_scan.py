"""A recurrence token by token: a state stays in registers from the first token of a sequence to the last.

    tokens in HBM    t+5  t+4  t+3  t+2  t+1 ---- asynchronous copies ---> shared memory
                                                                           token t
    state in HBM ---------------------------------> registers [K, BLOCK_V] ---> decay, write, read ---> output t
                                                    ... after the last token ---> state in HBM, in place

For each token, with the state S [K, V], and the terms that the call has:

    y = S^T low_rank_read
    S = S * exp(decay)[:, None] * exp(value_decay)[None, :] + low_rank_write y^T
    u = v,  or dt v,  or beta (v - S^T k)
    S = S + k u^T
    o = scale S^T q + skip v

`ejkernel.families.linear_recurrence.reference` names the sources: Yang et al. 2023, arXiv:2312.06635 (gates), Yang et
al. 2024, arXiv:2412.06464 (beta), and Peng et al. 2025, arXiv:2503.14456 (the low-rank term, never with beta), among
others.

A program has all key channels of one tile of value channels of one head's state, so no sum depends on another program.

All calls of a recurrence run the same instructions for a token, so the bits of a token depend on its fields and on the
state before it alone:

- The bounds of a sequence are loaded, in rows without packing too. A compiler that knew them could unroll a short loop,
  or remove that of one token, and would then be free to round products and sums in another way.
- A state is always loaded: zeros, if a call has none. A tile of constant zeros could have another layout, and its sums
  another order.

Loads in the loop are tiles, also those of one number per token: the compiler copies only tiles ahead of their use. So
such a number is loaded once for each channel. A padding token is loaded as it is, and then replaced by zeros: a mask
would have to wait for the token's role.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address, load_state_slot, load_token_range, zero_padding_outputs
from ejkernel_triton.linear_recurrence.decode.kernels.token_step import update_state


@triton.jit
def load_channels(at, token, channels, role, WIDTH: tl.constexpr, STRIDE: tl.constexpr, spec: tl.constexpr):
    """Returns a token's channels in float32; 0 beyond WIDTH, and for padding tokens."""
    x = tl.load(at + token * STRIDE + channels, mask=channels < WIDTH, other=0.0).to(tl.float32)
    if spec.HAS_SEGMENTS:
        x = tl.where(role > 0, x, 0.0)
    return x


@triton.jit
def load_number(at, token, channels, role, STRIDE: tl.constexpr, spec: tl.constexpr):
    """Returns a number of a token in float32, once for each channel; 0 for padding tokens."""
    x = tl.load(at + token * STRIDE + channels * 0).to(tl.float32)
    if spec.HAS_SEGMENTS:
        x = tl.where(role > 0, x, 0.0)
    return x


@triton.jit
def token_scan_kernel(
    query,
    key,
    value,
    decay,
    value_decay,
    beta,
    dt,
    skip,
    low_rank_write,
    low_rank_read,
    segment_roles,
    cu_seqlens,
    slots,
    initial_states,
    final_states,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes all tokens of a sequence for one tile of one head's state.

    `final_states` has the initial states: a program reads its tile before it writes it, and no other program has it.
    """
    program = tl.program_id(0)
    tile = program % spec.NUM_VALUE_TILES
    head = program // spec.NUM_VALUE_TILES % spec.H
    sequence = program // (spec.NUM_VALUE_TILES * spec.H) % spec.NUM_SEQUENCES
    row = tl.cast(program // (spec.NUM_VALUE_TILES * spec.H * spec.NUM_SEQUENCES), tl.int64)
    channels, columns = tl.arange(0, spec.BLOCK_K), tile * spec.BLOCK_V + tl.arange(0, spec.BLOCK_V)
    cu_seqlens = batch_row_address(cu_seqlens, row, per.CU_SEQLENS, spec.NUM_SEQUENCES + 1)
    first_token, end = load_token_range(cu_seqlens, sequence)
    at = head * (spec.K * spec.V)
    if spec.STATE_IS_TRANSPOSED:
        at += channels[:, None] + columns[None, :] * spec.K
    else:
        at += channels[:, None] * spec.V + columns[None, :]
    mask = (channels < spec.K)[:, None] & (columns < spec.V)[None, :]
    state_index = tl.cast(sequence, tl.int64)
    if spec.NUM_SLOTS > 0:
        slots = batch_row_address(slots, row, per.SLOTS, spec.NUM_SEQUENCES)
        state_index, uses_slot = load_state_slot(slots, sequence, first_token, end, spec.NUM_SLOTS)
        mask = mask & (channels * 0 + uses_slot > 0)[:, None]  # the interpreter has no & of a tile and a scalar
    STATES_PER_ROW: tl.constexpr = spec.NUM_SLOTS if spec.NUM_SLOTS > 0 else spec.NUM_SEQUENCES
    states = final_states + (row * STATES_PER_ROW + state_index) * (spec.H * spec.K * spec.V) + at
    state = tl.load(states, mask=mask, other=0.0).to(tl.float32)
    query = batch_row_address(query, row, per.QUERY, spec.T * spec.HQ * spec.K) + head // (spec.H // spec.HQ) * spec.K
    key = batch_row_address(key, row, per.KEY, spec.T * spec.HK * spec.K) + head // (spec.H // spec.HK) * spec.K
    value = batch_row_address(value, row, per.VALUE, spec.T * spec.HV * spec.V) + head // (spec.H // spec.HV) * spec.V
    output += (row * spec.T * spec.H + head) * spec.V
    if spec.GATE_CHANNELS > 0:
        decay = (
            batch_row_address(decay, row, per.DECAY, spec.NUM_GATE_TOKENS * spec.H * spec.GATE_CHANNELS)
            + head * spec.GATE_CHANNELS
        )
    if spec.HAS_VALUE_DECAY:
        value_decay = batch_row_address(value_decay, row, per.VALUE_DECAY, spec.T * spec.H * spec.V) + head * spec.V
    if spec.HAS_BETA:
        beta = batch_row_address(beta, row, per.BETA, spec.T * spec.H) + head
    if spec.HAS_DT:
        dt = batch_row_address(dt, row, per.DT, spec.T * spec.H) + head
    if spec.HAS_SKIP:
        skip_weight = tl.load(batch_row_address(skip, row, per.SKIP, spec.H) + head).to(tl.float32)
    if spec.HAS_LOW_RANK:
        low_rank_write = (
            batch_row_address(low_rank_write, row, per.LOW_RANK_WRITE, spec.T * spec.H * spec.K) + head * spec.K
        )
        low_rank_read = (
            batch_row_address(low_rank_read, row, per.LOW_RANK_READ, spec.T * spec.H * spec.K) + head * spec.K
        )
    if spec.HAS_SEGMENTS:
        segment_roles = batch_row_address(segment_roles, row, per.SEGMENT_ROLES, spec.T)
    for token in tl.range(first_token, end, num_stages=spec.NUM_STAGES):
        key_role, role = channels, columns
        if spec.HAS_SEGMENTS:
            key_role = tl.load(segment_roles + token + channels * 0)
            role = tl.load(segment_roles + token + columns * 0)
        q = load_channels(query, token, channels, key_role, spec.K, spec.HQ * spec.K, spec)
        k = load_channels(key, token, channels, key_role, spec.K, spec.HK * spec.K, spec)
        v = load_channels(value, token, columns, role, spec.V, spec.HV * spec.V, spec)
        g, w, b = v, v, v  # fields that a call does not have are not read
        if spec.GATE_CHANNELS == 1:
            g = load_number(decay, token, columns, role, spec.GATE_TOKEN_STRIDE, spec)
        if spec.GATE_CHANNELS > 1:
            g = load_channels(decay, token, channels, key_role, spec.K, spec.GATE_TOKEN_STRIDE, spec)
        if spec.HAS_VALUE_DECAY:
            w = load_channels(value_decay, token, columns, role, spec.V, spec.H * spec.V, spec)
        if spec.HAS_BETA:
            b = load_number(beta, token, columns, role, spec.H, spec)
        if spec.HAS_DT:
            b = load_number(dt, token, columns, role, spec.H, spec)
        if spec.HAS_LOW_RANK:
            write = load_channels(low_rank_write, token, channels, key_role, spec.K, spec.H * spec.K, spec)
            read = load_channels(low_rank_read, token, channels, key_role, spec.K, spec.H * spec.K, spec)
            if spec.HAS_SEGMENTS:
                state = tl.where(role > 1, 0.0, state)
            read_values = tl.sum(state * read[:, None], axis=0)
            if spec.HAS_SEGMENTS:
                read_values = tl.where(role > 0, read_values, 0.0)  # inf of the state times 0 is NaN
            state = update_state(state, k, v, g, w, b, role, spec) + write[:, None] * read_values[None, :]
        else:
            state = update_state(state, k, v, g, w, b, role, spec)
        # Read after the write: a token sees what it wrote.
        output_tile = spec.OUTPUT_SCALE * tl.sum(state * q[:, None], axis=0)
        if spec.HAS_SKIP:
            output_tile += skip_weight * v
        if spec.HAS_SEGMENTS:
            output_tile = tl.where(role > 0, output_tile, 0.0)
        output_pointers = output + token * (spec.H * spec.V) + columns
        tl.store(output_pointers, output_tile.to(output.dtype.element_ty), mask=columns < spec.V)
    tl.store(states, state.to(final_states.dtype.element_ty), mask=mask)
    if spec.IS_PACKED:
        zero_padding_outputs(output, cu_seqlens, sequence, columns, spec.NUM_SEQUENCES, spec.T, spec.H * spec.V, spec.V)
