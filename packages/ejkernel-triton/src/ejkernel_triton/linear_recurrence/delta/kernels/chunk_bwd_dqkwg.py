"""Computes gradients of queries, keys, gates and beta; the formulas are in `chunk_bwd_dhu`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import (
    NO_GRADIENT_BELOW,
    through_states,
)
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_tokens
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    FROM_MIDDLE,
    SINCE_START,
    TO_CUT,
    UNTIL_END,
    decayed,
    gate_operands,
    gate_sums,
    level_pairs,
    load_log_gates,
    sub_chunk_pairs,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    diagonal,
    gates_base,
    load_dt,
    load_rows,
    load_state,
    pair_weights,
    state_base,
    store_rows,
)


@triton.jit
def delta_channel_gradients(dq, dr, dk, dread, dseen, query, key, betas, high, low, signs, spec: tl.constexpr):
    """Adds the transposed products of `sub_chunk_scores` of both reads, of queries and of keys, to their gradients.

    Only the reading key is multiplied by beta: as a query it is beta k, as the key of a write k.

    Args:
        dq: [CHUNK, COLUMNS] float32.
        dr: [CHUNK, COLUMNS] float32, gradients of keys as queries, without beta.
        dk: [CHUNK, COLUMNS] float32, gradients of keys as keys of both reads.
        dread: [CHUNK, CHUNK], gradients of the queries' scores by (i, j), for j <= i; others are not used.
        dseen: [CHUNK, CHUNK], the same of the keys, without beta; 0 for j >= i.
        query: [CHUNK, COLUMNS].
        key: [CHUNK, COLUMNS].
        betas: [CHUNK].
        high: [CHUNK, COLUMNS], from `gate_operands`.
        low: [CHUNK, COLUMNS], likewise.
        signs: Address of the matrices of `gate_sums`.
    """
    # A token with itself has no decay, and no token sees its own key. In float32, so that these terms cancel in the
    # gradient of the gates, q dq - k dk, of which they would be the largest where gates are strong.
    diagonal_read = tl.sum(tl.where(diagonal(spec), dread, 0.0).to(tl.float32), 1)[:, None]
    dq += diagonal_read * key.to(tl.float32)
    dk += diagonal_read * query.to(tl.float32)
    FIRST: tl.constexpr = spec.SUB_LEVEL
    LEVELS: tl.constexpr = spec.LEVELS
    for level in tl.range(FIRST, LEVELS, num_stages=1, disable_licm=True):
        decay = tl.exp2(gate_sums(signs, TO_CUT + level, high, low, spec))
        right = decayed(key, decay)
        read = tl.where(level_pairs(level, spec), dread, 0.0).to(key.dtype)
        dq += decay * dot(read, right, spec)
        columns = dot(tl.trans(read), decayed(query, decay), spec)
        seen = tl.where(level_pairs(level, spec), dseen, 0.0).to(key.dtype)
        dr += decay * dot(seen, right, spec)
        columns = add_dot(columns, tl.trans(seen), decayed(key, decay * betas[:, None]), spec)
        dk += decay * columns
    if spec.SUB_CHUNK > 1:
        relative = gate_sums(signs, FROM_MIDDLE, high, low, spec)
        since, until = tl.exp2(relative), tl.exp2(-relative)
        right = decayed(key, until)
        # Other pairs are 0, and the factors are finite.
        read = tl.where(sub_chunk_pairs(spec) & ~diagonal(spec), dread, 0.0).to(key.dtype)
        dq += since * dot(read, right, spec)
        columns = dot(tl.trans(read), decayed(query, since), spec)
        seen = tl.where(sub_chunk_pairs(spec), dseen, 0.0).to(key.dtype)
        dr += since * dot(seen, right, spec)
        columns = add_dot(columns, tl.trans(seen), decayed(key, since * betas[:, None]), spec)
        dk += until * columns
    return dq, dr, dk


@triton.jit
def read_gradients(
    c_base,
    x_base,
    s_base,
    start,
    end,
    k_start,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns <c_i, x_j> [CHUNK, CHUNK] of cotangents c and writes x, and S c_i [CHUNK, BLOCK_K]."""
    C: tl.constexpr = spec.CHUNK
    pairs = tl.zeros([C, C], tl.float32)
    through_state = tl.zeros([C, BLOCK_K], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        c = load_rows(c_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        x = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        # Both products read the cotangent, so they share its tiles.
        pairs = add_dot(pairs, c, tl.trans(x), spec)
        through_state = add_dot(through_state, c.to(s.dtype), tl.trans(s), spec)
    return pairs, through_state


@triton.jit
def chunk_bwd_dqkwg_kernel(
    query,
    key,
    v_new,
    gates,
    decay,
    beta,
    cotangent,
    dy,
    states,
    dstates,
    signs,
    starts,
    ends,
    dquery,
    dkey,
    dgates,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATES: tl.constexpr,
):
    """Computes gradients of BLOCK_K channels of one head's queries and keys in one chunk, of its gates and of beta."""
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    tile = program % K_TILES
    k_start = tile * BLOCK_K
    program = program // K_TILES
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, C)
    x_base = chunk_base(v_new, row // per.V_NEW, start, head, spec.T, spec.H, spec.V)
    o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
    y_base = chunk_base(dy, row // per.DY, start, head, spec.T, spec.H, spec.V)
    s_base = state_base(states, row, head, chunk, spec)
    d_base = state_base(dstates, row, head, chunk, spec)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    values = (x_base, s_base, d_base, start, end)
    strictly_earlier = rows[:, None] > rows[None, :]

    # Ordered by register pressure: queries, then keys read as queries, then keys; each is stored before the next.
    pairs, dq = read_gradients(o_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
    q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
    k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
    dq *= spec.SCALE
    pairs *= spec.SCALE
    to_q = chunk_base(dquery, row, start, head, spec.T, spec.H, spec.K)
    to_k = chunk_base(dkey, row, start, head, spec.T, spec.H, spec.K)
    if spec.WIDTH > 1:
        # Gates per key channel: each level adds to all gradients. Pairs are kept at 16 bits, in half of the registers.
        read = pairs.to(q.dtype)
        pairs, dr = read_gradients(y_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
        # The second read: the key as a query, with -dy as its cotangent. A key reads what earlier tokens wrote, not its
        # own write: strictly below the diagonal.
        seen = tl.where(strictly_earlier, -pairs, 0.0).to(k.dtype)
        dk, state_product = through_states(values, k_start, GATES, spec.H, BLOCK_K, BLOCK_V, spec)
        d_base = chunk_base(decay, row // per.DECAY, start * (T > 1), head, T, spec.H, spec.K)
        g = load_log_gates(d_base, start, end, k_start, (T > 1) * spec.H * spec.K, BLOCK_K, spec)
        high, low = gate_operands(g, k.dtype)
        since = tl.exp2(gate_sums(signs, SINCE_START, high, low, spec))
        dq *= since
        dr *= -since
        dk *= tl.exp2(gate_sums(signs, UNTIL_END, high, low, spec))
        state_product = state_product * tl.exp2(tl.sum(g, 0)) + tl.sum(dk * k.to(tl.float32), 0)
        dq, dr, dk = delta_channel_gradients(dq, dr, dk, read, seen, q, k, betas, high, low, signs, spec)
        store_rows(to_q, dq, start, end, k_start, spec.H, spec.K, spec)
        dgate = dq * q.to(tl.float32)
        store_tokens(dbeta, tl.sum(dr * k.to(tl.float32), 1), row, start, end, tile, K_TILES, head, spec)
        # dbeta above needs the product without beta; from here on it includes beta, so that no gradient is divided by
        # beta.
        dr *= betas[:, None]
        store_rows(to_k, dk + dr, start, end, k_start, spec.H, spec.K, spec)
        if GATES:
            # G_t has a positive sign in the exponents of what token t reads, a negative one in those of what it wrote.
            dgate += (dr - dk) * k.to(tl.float32)
            # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier tokens.
            dgate = (tl.sum(dgate, 0) + state_product)[None, :] - (tl.cumsum(dgate, 0) - dgate)
            dgate = tl.where(g < NO_GRADIENT_BELOW, 0.0, dgate)
            to = chunk_base(dgates, row, start, head, spec.T, spec.H, spec.K)
            store_rows(to, dgate, start, end, k_start, spec.H, spec.K, spec)
    else:
        if spec.WIDTH == 1:
            g_base = gates_base(gates, row, head, chunk, spec, per)
            g = tl.load(g_base + rows)
            dq *= tl.exp2(g)[:, None]
            pairs *= pair_weights(g)
        else:
            pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
        # Kept for dk below in the operands' dtype: at 16 bits half of the registers of float32 pairs.
        read = pairs.to(q.dtype)
        dq = add_dot(dq, read, k, spec)
        store_rows(to_q, dq, start, end, k_start, spec.H, spec.K, spec)
        dgate = tl.sum(dq * q.to(tl.float32), 1)
        pairs, dr = read_gradients(y_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
        if spec.WIDTH == 1:
            dr *= tl.exp2(g)[:, None]
            pairs *= pair_weights(g)
        pairs = tl.where(strictly_earlier, pairs, 0.0)
        dr = add_dot(dr, pairs.to(k.dtype), k, spec)
        # dr is -r until here; the sign changes here and where dk is stored.
        along = -tl.sum(dr * k.to(tl.float32), 1)
        store_tokens(dbeta, along, row, start, end, tile, K_TILES, head, spec)
        dgate += along * betas
        # The gradients of the second read's scores, with beta and the sign of r, for dk as a key of that read.
        answered = (pairs * -betas[:, None]).to(k.dtype)
        dk, state_product = through_states(values, k_start, GATES, spec.H, BLOCK_K, BLOCK_V, spec)
        if spec.WIDTH == 1:
            last = tl.load(g_base + (C - 1))
            dk *= tl.exp2(last - g)[:, None]
            state_product *= tl.exp2(last)
        if GATES:
            # Before the chunk's own terms are added to dk: the last gate scales only what passes through dS.
            last_dgate = tl.sum(state_product, 0) + tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0)
        dk = add_dot(dk, tl.trans(read), q, spec)
        dk = add_dot(dk, tl.trans(answered), k, spec)
        store_rows(to_k, dk - dr * betas[:, None], start, end, k_start, spec.H, spec.K, spec)
        if GATES:
            dgate -= tl.sum(dk * k.to(tl.float32), 1)
            # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier tokens.
            dgate = tl.sum(dgate, 0) + last_dgate - (tl.cumsum(dgate, 0) - dgate)
            previous = tl.load(g_base + rows - 1, mask=rows > 0, other=0.0)
            dgate = tl.where(g - previous < NO_GRADIENT_BELOW, 0.0, dgate)
            store_tokens(dgates, dgate, row, start, end, tile, K_TILES, head, spec)
