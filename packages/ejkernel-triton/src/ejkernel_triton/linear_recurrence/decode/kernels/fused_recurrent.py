"""The decode step: updates a state in memory with a few tokens; the state is read once and written once.

    state in HBM    [K, BLOCK_V] ---- load ---> registers ---------------------------> store, in place if donated
    tokens                            load 0  | load 1           | load 2  ...
                                              | decay, write,    | decay, write,
                                              | read, store 0    | read, store 1

A program has all key channels of one tile of value channels of one head's state, so programs share no sums. A row of
the tile is BLOCK_V contiguous elements, loaded by 16 bytes per thread; of a transposed state [V, K] a column is. If
states are in slots, a program looks up its sequence's slot and touches no other. The next token is loaded while the
current one is computed, so that a step waits for memory once, not once per token.

With a tree of draft tokens every token continues the state after its parent, and the state after every token is stored:

    parents  -1  0  0          state -> registers -> token 0 -> token 1         (parent 0: the registers have it)
                               states[0] -> registers ------> token 2           (parent 0: loaded again)

A chain so loads no state but the first. A tile is stored and loaded by the same program; a barrier is between the two.

Missing tokens (padding, or the one after the last) are loaded as zeros: they decay by exp(0), write nothing and read
zero.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, at_batch, slot_of, tokens_of, zero_outputs


@triton.jit
def load_row(at, token, channels, there, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Returns a token's channels in float32; 0 beyond WIDTH and for a missing token."""
    mask = (channels < WIDTH) & (there + 0 * channels > 0)  # the interpreter has no & of a vector and a scalar
    return tl.load(at + token * STRIDE + channels, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_number(at, token, there, STRIDE: tl.constexpr):
    """Returns a token's scalar in float32."""
    return tl.load(at + token * STRIDE, mask=there > 0, other=0.0).to(tl.float32)


@triton.jit
def load_token(
    query, key, value, decay, value_decay, beta, dt, roles, parents, token, end, channels, columns, spec: tl.constexpr
):
    """Loads a token: its row of every field, 0 for absent fields, its role in its segment and its parent in a tree."""
    # The loop also issues the load after the last token, masked, so that it has no branch.
    there = tl.cast(token < end, tl.int32)
    role = there
    if spec.SEGMENTS:
        role = tl.load(roles + token, mask=there > 0, other=0)
        there = role
    q = load_row(query, token, channels, there, spec.K, spec.HQ * spec.K)
    k = load_row(key, token, channels, there, spec.K, spec.HK * spec.K)
    v = load_row(value, token, columns, there, spec.V, spec.HV * spec.V)
    # An absent field is a scalar that nothing reads: the loop must carry the same variables in every iteration.
    g = tl.cast(end * 0, tl.float32)
    w = g
    b = g
    if spec.DECAY == 1:
        g = load_number(decay, token, there, spec.DECAY_STRIDE)
    if spec.DECAY > 1:
        g = load_row(decay, token, channels, there, spec.K, spec.DECAY_STRIDE)
    if spec.VALUE_DECAY:
        w = load_row(value_decay, token, columns, there, spec.V, spec.H * spec.V)
    if spec.BETA:
        b = load_number(beta, token, there, spec.H)
    if spec.DT:
        b = load_number(dt, token, there, spec.H)
    parent = role
    if spec.TREE:
        parent = tl.load(parents + token, mask=there > 0, other=0)
    return q, k, v, g, w, b, role, parent


@triton.jit
def state_after_parent(state, token, parent, first, initial, initial_mask, states, mask, spec: tl.constexpr):
    """Returns the state [K, V] that a token of a tree continues: `state`, after the token before, or one from memory.

    Args:
        state: The state after the token before, or before the first.
        token: The token's index in the row.
        parent: That of its parent; -1 for the state of the sequence.
        first: First token of the sequence.
        initial: Addresses of the sequence's state.
        initial_mask: Which of them to load.
        states: Addresses of the tile in the state after token 0 of the row.
        mask: Which of them to load.
        spec: The constants.
    """
    if parent < 0:
        if token > first:
            if spec.STATE:
                state = tl.load(initial, mask=initial_mask, other=0.0).to(tl.float32)
            else:
                state = tl.zeros_like(state)
    else:
        if parent != token - 1:
            tl.debug_barrier()  # other threads may have stored the elements that a thread loads
            state = tl.load(states + tl.cast(parent, tl.int64) * (spec.H * spec.K * spec.V), mask=mask, other=0.0)
    return state


@triton.jit
def zero_states(states, bounds, sequence, mask, spec: tl.constexpr):
    """Writes 0 to a sequence's share of the states after padding tokens, as `zero_outputs` does to the outputs."""
    zeros = tl.where(mask, 0.0, 0.0)
    before, behind = tl.load(bounds).to(tl.int64), tl.load(bounds + spec.SEQUENCES).to(tl.int64)
    for token in tl.range(tl.cast(sequence, tl.int64), before, spec.SEQUENCES):
        tl.store(states + token * (spec.H * spec.K * spec.V), zeros, mask=mask)
    for token in tl.range(behind + sequence, behind * 0 + spec.T, spec.SEQUENCES):
        tl.store(states + token * (spec.H * spec.K * spec.V), zeros, mask=mask)


@triton.jit
def update_state(state, k, v, g, w, b, role, spec: tl.constexpr):
    """Returns the state [K, V] after a token: restart, decay, write."""
    if spec.SEGMENTS:
        # `where` instead of a product: inf or NaN of the previous segment must not reach this one.
        state = tl.where(role > 1, 0.0, state)
    if spec.DECAY == 1:
        state *= tl.exp2(g * LOG2E)
    if spec.DECAY > 1:
        state *= tl.exp2(g * LOG2E)[:, None]
    if spec.VALUE_DECAY:
        state *= tl.exp2(w * LOG2E)[None, :]
    u = v
    if spec.DT:
        u = b * v
    if spec.BETA:
        # The sum crosses the program's warps through shared memory; a program of one warp needs none. For a single
        # token the products are matrix times vector: tensor cores would not help, since they are memory-bound.
        u = b * (v - tl.sum(state * k[:, None], axis=0))
    if spec.SEGMENTS:
        # Padding has k = 0, but inf of the state times 0 is NaN in the sum above: u must be 0 too.
        u = tl.where(role > 0, u, 0.0)
    return state + k[:, None] * u[None, :]


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
    roles,
    parents,
    bounds,
    slots,
    initial,
    final,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes all tokens of a sequence for one tile of one head's state.

    In place, `final` has the initial states: a program reads its tile before it writes it, and no other program has it.
    With trees `final` has the state after every token.
    """
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    BLOCK_V: tl.constexpr = spec.BLOCK_V
    program = tl.program_id(0)
    tile = program % spec.TILES
    head = program // spec.TILES % spec.H
    sequence = program // (spec.TILES * spec.H) % spec.SEQUENCES
    row = tl.cast(program // (spec.TILES * spec.H * spec.SEQUENCES), tl.int64)
    channels, columns = tl.arange(0, spec.BLOCK_K), tile * spec.BLOCK_V + tl.arange(0, spec.BLOCK_V)
    at = head * (spec.K * spec.V)
    if spec.TRANSPOSED:
        at += channels[:, None] + columns[None, :] * spec.K
    else:
        at += channels[:, None] * spec.V + columns[None, :]
    inside = (channels < spec.K)[:, None] & (columns < spec.V)[None, :]
    mask = inside
    # 64 bits: a token's index times its stride may need more than 31.
    first = tl.cast(tile * 0, tl.int64)
    end = first + spec.T
    if spec.PACKED:
        bounds = at_batch(bounds, row, per.BOUNDS, spec.SEQUENCES + 1)
        first, end = tokens_of(bounds, sequence)
    STATES: tl.constexpr = (spec.SLOTS if spec.SLOTS > 0 else spec.SEQUENCES) * spec.H * spec.K * spec.V
    place = tl.cast(sequence, tl.int64)
    if spec.SLOTS > 0:
        slots = at_batch(slots, row, per.SLOTS, spec.SEQUENCES)
        place, used = slot_of(slots, sequence, first, end, spec.SLOTS)
        mask = mask & (channels * 0 + used > 0)[:, None]  # the interpreter has no & of a tile and a scalar
    if spec.TREE:
        target = final + row * (spec.T * spec.H * spec.K * spec.V) + at
    else:
        target = final + row * STATES + place * (spec.H * spec.K * spec.V) + at
    source = target
    # The state is loaded first, since it is most of the traffic.
    if spec.IN_PLACE:
        state = tl.load(target, mask=mask, other=0.0, eviction_policy=spec.EVICTION).to(tl.float32)
    elif spec.STATE:
        source = at_batch(initial, row, per.INITIAL, STATES) + place * (spec.H * spec.K * spec.V) + at
        state = tl.load(source, mask=mask, other=0.0, eviction_policy=spec.EVICTION).to(tl.float32)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    query = at_batch(query, row, per.QUERY, spec.T * spec.HQ * spec.K) + head // (spec.H // spec.HQ) * spec.K
    key = at_batch(key, row, per.KEY, spec.T * spec.HK * spec.K) + head // (spec.H // spec.HK) * spec.K
    value = at_batch(value, row, per.VALUE, spec.T * spec.HV * spec.V) + head // (spec.H // spec.HV) * spec.V
    output += (row * spec.T * spec.H + head) * spec.V
    if spec.DECAY > 0:
        decay = at_batch(decay, row, per.DECAY, spec.DECAY_T * spec.H * spec.DECAY) + head * spec.DECAY
    if spec.VALUE_DECAY:
        value_decay = at_batch(value_decay, row, per.VALUE_DECAY, spec.T * spec.H * spec.V) + head * spec.V
    if spec.BETA:
        beta = at_batch(beta, row, per.BETA, spec.T * spec.H) + head
    if spec.DT:
        dt = at_batch(dt, row, per.DT, spec.T * spec.H) + head
    if spec.SKIP:
        skip_weight = tl.load(at_batch(skip, row, per.SKIP, spec.H) + head).to(tl.float32)
    if spec.SEGMENTS:
        roles = at_batch(roles, row, per.ROLES, spec.T)
    if spec.TREE:
        parents = at_batch(parents, row, per.PARENTS, spec.T)
    q, k, v, g, w, b, role, parent = load_token(
        query, key, value, decay, value_decay, beta, dt, roles, parents, first, end, channels, columns, spec
    )
    for token in tl.range(first, end):
        # Issued before this token's arithmetic, which hides the latency.
        next_q, next_k, next_v, next_g, next_w, next_b, next_role, next_parent = load_token(
            query, key, value, decay, value_decay, beta, dt, roles, parents, token + 1, end, channels, columns, spec
        )
        if spec.TREE:
            state = state_after_parent(state, token, parent, first, source, mask, target, inside, spec)
        state = update_state(state, k, v, g, w, b, role, spec)
        # Read after the write: a token sees what it wrote.
        read = spec.SCALE * tl.sum(state * q[:, None], axis=0)
        if spec.SKIP:
            read += skip_weight * v
        if spec.SEGMENTS:
            read = tl.where(role > 0, read, 0.0)
        at_token = output + token * (spec.H * spec.V) + columns
        tl.store(at_token, read.to(output.dtype.element_ty), mask=columns < spec.V)
        if spec.TREE:
            tl.store(target + token * (spec.H * spec.K * spec.V), state, mask=inside, eviction_policy=spec.EVICTION)
        q, k, v, g, w, b, role, parent = next_q, next_k, next_v, next_g, next_w, next_b, next_role, next_parent
    if not spec.TREE:
        # In place, only this program read the tile, at the top.
        tl.store(target, state.to(final.dtype.element_ty), mask=mask, eviction_policy=spec.EVICTION)
    if spec.PACKED:
        zero_outputs(output, bounds, sequence, columns, spec.SEQUENCES, spec.T, spec.H * spec.V, spec.V)
        if spec.TREE:
            zero_states(target, bounds, sequence, inside, spec)
