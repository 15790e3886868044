"""Trees of draft tokens in the decode step: the state after a token's parent, and the states after padding tokens."""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.decode.kernels.token_step import load_token, update_state


@triton.jit
def limit_parent(parent, token, first_token):
    """Returns a token's parent among the tokens of its sequence: one that does not come before it counts as the token
    before, so that paths end.
    """
    return tl.maximum(tl.minimum(tl.cast(parent, tl.int64), token - first_token - 1), -1)


@triton.jit
def state_after_parent(
    state, token, parent, first_token, initial_states, initial_state_mask, states, mask, spec: tl.constexpr
):
    """Returns the state [K, V] that a token of a tree continues: `state`, after the token before, or one from memory.

    Args:
        state: The state after the token before, or before the first.
        token: The token's index in the row.
        parent: That of its parent among the tokens of the sequence; -1 for the state of the sequence.
        first_token: First token of the sequence.
        initial_states: Addresses of the sequence's state.
        initial_state_mask: Which of them to load.
        states: Addresses of the tile in the state after token 0 of the row.
        mask: Which of them to load.
        spec: The constants.
    """
    parent = limit_parent(parent, token, first_token)
    if parent < 0:
        if token > first_token:
            if spec.HAS_INITIAL_STATE:
                state = tl.load(initial_states, mask=initial_state_mask, other=0.0).to(tl.float32)
            else:
                state = tl.zeros_like(state)
    else:
        if first_token + parent != token - 1:
            tl.debug_barrier()  # other threads may have stored the elements that a thread loads
            state = tl.load(states + (first_token + parent) * (spec.H * spec.K * spec.V), mask=mask, other=0.0)
    return state


@triton.jit
def replay_path(
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
    initial_states,
    initial_state_mask,
    spec: tl.constexpr,
):
    """Returns the state [K, V] that a token of a tree continues: `state`, after the token before, or one that is
    recomputed from the sequence's state with the tokens on the path to the parent.
    """
    parent = limit_parent(parent, token, first_token)
    if first_token + parent != token - 1:
        state = tl.zeros_like(state)
        if spec.HAS_INITIAL_STATE:
            state += tl.load(initial_states, mask=initial_state_mask, other=0.0).to(tl.float32)
        parents_of_sequence = parents + first_token
        depth = parent * 0
        ancestor = parent
        while ancestor >= 0:
            depth += 1
            ancestor = limit_parent(tl.load(parents_of_sequence + ancestor), ancestor, first_token * 0)
        # The path is known from its end alone: it is short, and its indices are in the L1 cache.
        for remaining in tl.range(depth):
            ancestor = parent
            for _ in tl.range(depth - 1 - remaining):
                ancestor = limit_parent(tl.load(parents_of_sequence + ancestor), ancestor, first_token * 0)
            _, k, v, g, w, b, segment_role, _ = load_token(
                query,
                key,
                value,
                decay,
                value_decay,
                beta,
                dt,
                segment_roles,
                parents,
                first_token + ancestor,
                end,
                channels,
                columns,
                spec,
            )
            state = update_state(state, k, v, g, w, b, segment_role, spec)
    return state


@triton.jit
def zero_padding_states(states, cu_seqlens, sequence, mask, spec: tl.constexpr):
    """Writes 0 to a sequence's share of the states after padding tokens, as `zero_padding_outputs` does to outputs."""
    zeros = tl.where(mask, 0.0, 0.0)
    sequences_start, sequences_end = (
        tl.load(cu_seqlens).to(tl.int64),
        tl.load(cu_seqlens + spec.NUM_SEQUENCES).to(tl.int64),
    )
    for token in tl.range(tl.cast(sequence, tl.int64), sequences_start, spec.NUM_SEQUENCES):
        tl.store(states + token * (spec.H * spec.K * spec.V), zeros, mask=mask)
    for token in tl.range(sequences_end + sequence, sequences_end * 0 + spec.T, spec.NUM_SEQUENCES):
        tl.store(states + token * (spec.H * spec.K * spec.V), zeros, mask=mask)
