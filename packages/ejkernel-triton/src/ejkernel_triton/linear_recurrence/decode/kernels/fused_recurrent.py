"""The decode step: updates a state in memory with a few tokens; the state is read once and written once.

    state in HBM    [K, BLOCK_V] ---- load ---> registers ---------------------------> store, in place if donated
    tokens                            load 0  | load 1           | load 2  ...
                                              | decay, write,    | decay, write,
                                              | read, store 0    | read, store 1

A program has all key channels of one tile of value channels of one head's state, so programs share no sums. A row of
the tile is BLOCK_V contiguous elements, loaded by 16 bytes per thread; of a transposed state [V, K] a column is. If
states are in slots, a program looks up its sequence's slot and touches no other. The next token is loaded while the
current one is computed, so that a step waits for memory once, not once per token.

With a tree of draft tokens every token continues the state after its parent, and the state after every token is stored
if the caller gets it:

    parents  -1  0  0          state -> registers -> token 0 -> token 1         (parent 0: the registers have it)
                               states[0] -> registers ------> token 2           (parent 0: loaded again)

A chain so loads no state but the first. The same program stores and loads a tile, with a barrier between the two.
If states are not stored, the path to such a parent is computed again from the sequence's state, which is still in the
L2 cache: a state takes as long to store as four tokens to compute, and the paths of draft trees are that short.

Missing tokens (padding, or the one after the last) are loaded as zeros: they decay by exp(0), write nothing and read
zero.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address, load_state_slot, load_token_range, zero_padding_outputs
from ejkernel_triton.linear_recurrence.decode.kernels.token_step import load_token, update_state
from ejkernel_triton.linear_recurrence.decode.kernels.token_trees import (
    replay_path,
    state_after_parent,
    zero_padding_states,
)


@triton.jit
def fused_recurrent_kernel(
    query,
    key,
    value,
    decay,
    value_decay,
    beta,
    dt,
    skip,
    segment_roles,
    parents,
    cu_seqlens,
    slots,
    initial_states,
    final_states,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes all tokens of a sequence for one tile of one head's state.

    In place, `final_states` has the initial states: a program reads its tile before it writes it, and no other program
    has it. With trees `final_states` has the state after every token, or nothing.
    """
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    BLOCK_V: tl.constexpr = spec.BLOCK_V
    program = tl.program_id(0)
    tile = program % spec.NUM_VALUE_TILES
    head = program // spec.NUM_VALUE_TILES % spec.H
    sequence = program // (spec.NUM_VALUE_TILES * spec.H) % spec.NUM_SEQUENCES
    row = tl.cast(program // (spec.NUM_VALUE_TILES * spec.H * spec.NUM_SEQUENCES), tl.int64)
    channels, columns = tl.arange(0, spec.BLOCK_K), tile * spec.BLOCK_V + tl.arange(0, spec.BLOCK_V)
    at = head * (spec.K * spec.V)
    if spec.STATE_IS_TRANSPOSED:
        at += channels[:, None] + columns[None, :] * spec.K
    else:
        at += channels[:, None] * spec.V + columns[None, :]
    in_bounds = (channels < spec.K)[:, None] & (columns < spec.V)[None, :]
    mask = in_bounds
    # 64 bits: a token's index times its stride may need more than 31.
    first_token = tl.cast(tile * 0, tl.int64)
    end = first_token + spec.T
    if spec.IS_PACKED:
        cu_seqlens = batch_row_address(cu_seqlens, row, per.CU_SEQLENS, spec.NUM_SEQUENCES + 1)
        first_token, end = load_token_range(cu_seqlens, sequence)
    STATE_ELEMENTS_PER_ROW: tl.constexpr = (
        (spec.NUM_SLOTS if spec.NUM_SLOTS > 0 else spec.NUM_SEQUENCES) * spec.H * spec.K * spec.V
    )
    state_index = tl.cast(sequence, tl.int64)
    if spec.NUM_SLOTS > 0:
        slots = batch_row_address(slots, row, per.SLOTS, spec.NUM_SEQUENCES)
        state_index, uses_slot = load_state_slot(slots, sequence, first_token, end, spec.NUM_SLOTS)
        mask = mask & (channels * 0 + uses_slot > 0)[:, None]  # the interpreter has no & of a tile and a scalar
    if spec.STORES_TOKEN_STATES:
        final_state_pointers = final_states + row * (spec.T * spec.H * spec.K * spec.V) + at
    else:
        final_state_pointers = (
            final_states + row * STATE_ELEMENTS_PER_ROW + state_index * (spec.H * spec.K * spec.V) + at
        )
    initial_state_pointers = final_state_pointers
    # The state is loaded first, since it is most of the traffic.
    if spec.STATES_ARE_IN_PLACE:
        state = tl.load(final_state_pointers, mask=mask, other=0.0, eviction_policy=spec.STATE_EVICTION_POLICY).to(
            tl.float32
        )
    elif spec.HAS_INITIAL_STATE:
        initial_state_pointers = (
            batch_row_address(initial_states, row, per.INITIAL_STATES, STATE_ELEMENTS_PER_ROW)
            + state_index * (spec.H * spec.K * spec.V)
            + at
        )
        state = tl.load(initial_state_pointers, mask=mask, other=0.0, eviction_policy=spec.STATE_EVICTION_POLICY).to(
            tl.float32
        )
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
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
    if spec.HAS_SEGMENTS:
        segment_roles = batch_row_address(segment_roles, row, per.SEGMENT_ROLES, spec.T)
    if spec.HAS_TREES:
        parents = batch_row_address(parents, row, per.PARENTS, spec.T)
    q, k, v, g, w, b, segment_role, parent = load_token(
        query,
        key,
        value,
        decay,
        value_decay,
        beta,
        dt,
        segment_roles,
        parents,
        first_token,
        end,
        channels,
        columns,
        spec,
    )
    for token in tl.range(first_token, end):
        # Issued before this token's arithmetic, which hides the latency.
        next_q, next_k, next_v, next_g, next_w, next_b, next_segment_role, next_parent = load_token(
            query,
            key,
            value,
            decay,
            value_decay,
            beta,
            dt,
            segment_roles,
            parents,
            token + 1,
            end,
            channels,
            columns,
            spec,
        )
        if spec.STORES_TOKEN_STATES:
            state = state_after_parent(
                state, token, parent, first_token, initial_state_pointers, mask, final_state_pointers, in_bounds, spec
            )
        elif spec.HAS_TREES:
            state = replay_path(
                state,
                query,
                key,
                value,
                decay,
                value_decay,
                beta,
                dt,
                segment_roles,
                parents,
                token,
                parent,
                first_token,
                end,
                channels,
                columns,
                initial_state_pointers,
                mask,
                spec,
            )
        state = update_state(state, k, v, g, w, b, segment_role, spec)
        # Read after the write: a token sees what it wrote.
        output_tile = spec.OUTPUT_SCALE * tl.sum(state * q[:, None], axis=0)
        if spec.HAS_SKIP:
            output_tile += skip_weight * v
        if spec.HAS_SEGMENTS:
            output_tile = tl.where(segment_role > 0, output_tile, 0.0)
        output_pointers = output + token * (spec.H * spec.V) + columns
        tl.store(output_pointers, output_tile.to(output.dtype.element_ty), mask=columns < spec.V)
        if spec.STORES_TOKEN_STATES:
            tl.store(
                final_state_pointers + token * (spec.H * spec.K * spec.V),
                state,
                mask=in_bounds,
                eviction_policy=spec.STATE_EVICTION_POLICY,
            )
        q, k, v, g, w, b, segment_role, parent = (
            next_q,
            next_k,
            next_v,
            next_g,
            next_w,
            next_b,
            next_segment_role,
            next_parent,
        )
    if not spec.HAS_TREES:
        # In place, only this program read the tile, at the top.
        tl.store(
            final_state_pointers,
            state.to(final_states.dtype.element_ty),
            mask=mask,
            eviction_policy=spec.STATE_EVICTION_POLICY,
        )
    if spec.IS_PACKED:
        zero_padding_outputs(output, cu_seqlens, sequence, columns, spec.NUM_SEQUENCES, spec.T, spec.H * spec.V, spec.V)
        if spec.STORES_TOKEN_STATES:
            zero_padding_states(final_state_pointers, cu_seqlens, sequence, in_bounds, spec)
