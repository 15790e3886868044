# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Gradients of the delta rule, whose tokens write x = (I + L)^-1 diag(beta) (V - (exp2(G) K) S_0) = U - W S_0.

A token reads twice: o_i with its query, and what the state answers to its key with -dv_i for a cotangent. So keys have
the gradients of a query and those of a key. With A the scores, S the state before a chunk and dS the gradient of the
one after it:

    intra_chunk_kernel           all chunks at the same time        do -> A^T do
    state_gradients_kernel       from the last chunk to the first   dS, q, do, W, k, A^T do -> dx, dS
                 dx = A^T do + (k exp2(G_T - G)) dS
                 dS = exp2(G_T) dS + scale (q exp2(G))^T do - W^T dx
                 with gates of channels, the same of what is decayed already (see `delta_channels_kernel`)
    inverse_gradients_kernel     all chunks at the same time        dx -> dy = (I + L)^-T dx, dv = beta dy
    delta_key_gradients_kernel   all chunks, BLOCK_K key channels   dy, do, x -> dq, dk, dG, dbeta
                 r_i    = -(exp2(G_i) S dy_i + sum_{j < i} w_ij <dy_i, x_j> k_j)     k_i as a query, without beta
                 dk_i   = beta_i r_i + (its part as a key of both reads)
                 dbeta  = <dy, v> + <r, k>
                 dG_t   = q_t dq_t + k_t beta_t r_t - k_t (its part as a key)

No gradient is divided by beta, which may be 0. No atomic additions: programs that each have a part of a gradient store
their parts, which are added in a fixed order, so every run gives the same bits.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.gradients_kernels import (
    NO_GRADIENT_BELOW,
    channel_gradients,
    store_tokens,
    through_states,
)
from ejkernel_triton.linear_recurrence.reach_kernel import load_reach
from ejkernel_triton.linear_recurrence.tile import (
    chunk_base,
    chunk_span,
    cut_weights,
    from_middle,
    gates_base,
    load_dt,
    load_gates,
    load_last_gates,
    load_rows,
    load_state,
    nth_sequence,
    pair_weights,
    pairs_of,
    scores_at,
    state_base,
    state_factors,
    store_rows,
    store_state,
    walk_span,
)


@triton.jit
def intra_chunk_kernel(
    query,
    key,
    gates,
    scores,
    cotangent,
    starts,
    ends,
    intra_chunk,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """scale A^T do of one head's chunk: what later tokens of the chunk read of what a token writes."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, C)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    if spec.WIDTH > 1:
        # From `scores_kernel`, or the forward pass: decayed, 0 above the diagonal, without the scale.
        pairs = tl.load(scores_at(scores, row, head, chunk, spec)).to(tl.float32)
    else:
        pairs = tl.zeros([C, C], tl.float32)
        for k_start in tl.range(0, spec.K, BLOCK_K):
            q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
            k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
            pairs = add_dot(pairs, q, tl.trans(k), spec)
    if spec.WIDTH == 1:
        pairs *= pair_weights(tl.load(g_base + rows))
    if spec.WIDTH == 0:
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    # A^T is the same left operand for all tiles of values.
    pairs *= spec.SCALE
    o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
    to = chunk_base(intra_chunk, row, start, head, spec.T, spec.H, spec.V)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        store_rows(to, dot(tl.trans(pairs.to(do.dtype)), do, spec), start, end, v_start, spec.H, spec.V, spec)


@triton.jit
def state_gradients_kernel(
    query,
    key,
    gates,
    correction,
    cotangent,
    intra_chunk,
    final,
    bounds,
    first_chunks,
    order,
    reach,
    dstates,
    first_gradient,
    dwritten,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FINAL: tl.constexpr,
    WRITE: tl.constexpr,
    OFFSET: tl.constexpr,
    REACH: tl.constexpr,
):
    """Passes BLOCK_V columns of the gradient of one head's state from the last chunk of a sequence to the first.

    A program holds all key channels, padded to BLOCK_K, since dx is a sum over them.
    """
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.SEQUENCES
    sequence = nth_sequence(order, row, program % spec.SEQUENCES, spec, per)
    first, last, sequence_start, end = walk_span(bounds, first_chunks, row, sequence + OFFSET, spec, per)
    if REACH > 0:
        # From the segment's beginning the gradient passes on: what vanishes until there is left out.
        SEGMENTS: tl.constexpr = (spec.CHUNKS + spec.PER_SEQUENCE - 1) // spec.PER_SEQUENCE
        last = tl.minimum(last, first + load_reach(reach, row, sequence + OFFSET, head, SEGMENTS, REACH, spec))
    rows = tl.arange(0, C)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FINAL:
        final_row = tl.cast(row // per.FINAL, tl.int64) * spec.SEQUENCES + sequence
        state_offset = (final_row * spec.H + head) * (spec.K * spec.V)
        # The cotangent of the final state: the walk begins with it.
        acc = load_state(final + state_offset, 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    q_head = head // (spec.H // spec.HQ)
    k_head = head // (spec.H // spec.HK)
    next_factors = state_factors(gates, row, head, last - 1, 0, BLOCK_K, spec, per)
    for step in tl.range(0, last - first):
        chunk = last - 1 - step
        start = sequence_start + (chunk - first) * C
        before, between, after = next_factors
        # Loaded a chunk ahead: see `states_kernel`.
        next_factors = state_factors(gates, row, head, chunk - 1, 0, BLOCK_K, spec, per)
        # Before this chunk adds to it: the gradient of the state behind the chunk.
        if WRITE:
            store_state(state_base(dstates, row, head, chunk, spec), acc, 0, v_start, spec)
        q_base = chunk_base(query, row // per.QUERY, start, q_head, spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, k_head, spec.T, spec.HK, spec.K)
        w_base = chunk_base(correction, row // per.CORRECTION, start, head, spec.T, spec.H, spec.K)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        x_base = chunk_base(intra_chunk, row // per.INTRA_CHUNK, start, head, spec.T, spec.H, spec.V)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        # No address depends on `acc`, so the pipeliner can copy the next chunks' tiles under this one's products.
        q = load_rows(q_base, start, end, 0, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, 0, spec.HK, spec.K, BLOCK_K, spec)
        w = load_rows(w_base, start, end, 0, spec.H, spec.K, BLOCK_K, spec)
        do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        dx = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec).to(tl.float32)
        # With a gate a head, products are scaled by rows instead of queries and keys, which stay in shared memory.
        decay_since = spec.SCALE
        if spec.WIDTH == 1:
            g = tl.load(g_base + rows)
            total = tl.load(g_base + (C - 1))
            # dx reads the gradient behind the chunk: products with `acc` come before its decay.
            dx += tl.exp2(total - g)[:, None] * dot(k, acc.to(k.dtype), spec)
            decay_since = (tl.exp2(g) * spec.SCALE)[:, None]
            acc *= tl.exp2(total)
        else:
            if spec.DECAYED:
                acc *= tl.exp2(after)[:, None]
            dx = add_dot(dx, k, acc.to(k.dtype), spec)
        if spec.DECAYED:
            acc *= tl.exp2(between)[:, None]
        # Rounded once: the walk and `inverse_gradients_kernel` see the same dx.
        low = dx.to(dwritten.dtype.element_ty)
        if WRITE:
            to = chunk_base(dwritten, row, start, head, spec.T, spec.H, spec.V)
            store_rows(to, low, start, end, v_start, spec.H, spec.V, spec)
        # As accumulators of the products: `acc += dot(...)` made Triton 3.6 spill 192 bytes on sm_90
        # (docs/lab/linear_recurrence_gpu.md).
        acc = add_dot(acc, tl.trans(q), (do.to(tl.float32) * decay_since).to(do.dtype), spec)
        if spec.WIDEN:  # Triton's interpreter would negate the bits of bfloat16
            acc = add_dot(acc, tl.trans(w), -low.to(tl.float32), spec)
        else:
            acc = add_dot(acc, tl.trans(w), -low, spec)
        if spec.DECAYED:
            acc *= tl.exp2(before)[:, None]
    state_offset = ((tl.cast(row, tl.int64) * spec.SEQUENCES + sequence) * spec.H + head) * (spec.K * spec.V)
    store_state(first_gradient + state_offset, acc, 0, v_start, spec)


@triton.jit
def inverse_gradients_kernel(
    value,
    beta,
    inverse,
    dwritten,
    starts,
    ends,
    dy,
    dvalue,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dy = (I + L)^-T dx of one head's chunk, dv = beta dy and <dy, v>."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    v_base = chunk_base(value, row // per.VALUE, start, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V)
    x_base = chunk_base(dwritten, row // per.DWRITTEN, start, head, spec.T, spec.H, spec.V)
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    t = tl.load(scores_at(inverse, row, head, chunk, spec))
    sums = tl.zeros([C], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        dx = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        v = load_rows(v_base, start, end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        dy_tile = dot(tl.trans(t.to(dx.dtype)), dx, spec)
        # In float32, before dy is rounded to be stored.
        sums += tl.sum(dy_tile * v.to(tl.float32), 1)
        to = chunk_base(dy, row, start, head, spec.T, spec.H, spec.V)
        store_rows(to, dy_tile, start, end, v_start, spec.H, spec.V, spec)
        to = chunk_base(dvalue, row, start, head, spec.T, spec.H, spec.V)
        store_rows(to, dy_tile * betas[:, None], start, end, v_start, spec.H, spec.V, spec)
    store_tokens(dbeta, sums, row, start, end, 0, 1, head, spec)


@triton.jit
def reload_key_tiles(k_base, start, end, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Loads keys and cumulative gates of a chunk once more; see `reload_tiles`."""
    opaque_zero = level >> 5  # 0, which the compiler cannot fold
    k = load_rows(k_base + opaque_zero, start, end, column, spec.HK, spec.K, COLUMNS, spec)
    return k.to(tl.float32), load_gates(base + opaque_zero, column, COLUMNS, spec)


@triton.jit
def answer_gradients(
    dr,
    dk,
    dpairs,
    key,
    betas,
    gates,
    base,
    column,
    tile_bases,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """dr plus sum_j w_ijk pairs_ij k_jk, and dk plus sum_i w_ijk pairs_ij strength_i k_ik, with gates of channels.

    `gradients_kernels.channel_gradients` for keys that read keys before them; pairs are 0 for j >= i.
    """
    k_base, start, end = tile_bases
    # beta multiplies the reading key alone: as a query it is beta k, as the key of a write k.
    relative, weak = from_middle(gates, base, column, COLUMNS, spec)
    if weak:
        k = key.to(tl.float32)
        dscores = dpairs.to(key.dtype)
        decay_since, decay_until = tl.exp2(relative), tl.exp2(-relative)
        dr += decay_since * dot(dscores, (k * decay_until).to(key.dtype), spec)
        dk += decay_until * dot(tl.trans(dscores), (k * decay_since * betas[:, None]).to(key.dtype), spec)
    else:
        LEVELS: tl.constexpr = spec.LEVELS
        for level in tl.range(0, LEVELS, num_stages=1):
            # Loaded in each halving, as in `channel_gradients`: held through the loop they would spill.
            k, g = reload_key_tiles(k_base, start, end, base, column, level, COLUMNS, spec)
            weights = cut_weights(g, base, column, level, COLUMNS, spec)
            dscores = tl.where(pairs_of(level, spec), dpairs, 0.0).to(key.dtype)
            dr += weights * dot(dscores, (k * weights).to(key.dtype), spec)
            dk += weights * dot(tl.trans(dscores), (k * weights * betas[:, None]).to(key.dtype), spec)
    return dr, dk


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
    """<c_i, x_j> [CHUNK, CHUNK] of cotangents c and writes x, and S c_i [CHUNK, BLOCK_K]."""
    C: tl.constexpr = spec.CHUNK
    pairs = tl.zeros([C, C], tl.float32)
    through_state = tl.zeros([C, BLOCK_K], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        c = load_rows(c_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        x = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        # Both read the cotangent, so they share its tiles.
        pairs = add_dot(pairs, c, tl.trans(x), spec)
        through_state = add_dot(through_state, c.to(s.dtype), tl.trans(s), spec)
    return pairs, through_state


@triton.jit
def delta_key_gradients_kernel(
    query,
    key,
    written,
    gates,
    beta,
    cotangent,
    dy,
    states,
    dstates,
    starts,
    ends,
    dquery,
    dkey,
    dgates,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATES: tl.constexpr,
):
    """Gradients of BLOCK_K channels of one head's queries and keys in one chunk, of its gates and of beta."""
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
    x_base = chunk_base(written, row // per.WRITTEN, start, head, spec.T, spec.H, spec.V)
    o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
    y_base = chunk_base(dy, row // per.DY, start, head, spec.T, spec.H, spec.V)
    s_base = state_base(states, row, head, chunk, spec)
    d_base = state_base(dstates, row, head, chunk, spec)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    values = (x_base, s_base, d_base, start, end)
    strictly_earlier = rows[:, None] > rows[None, :]

    # Order by register pressure: queries first, then keys read as queries, then keys; each is stored before the next.
    pairs, dq = read_gradients(o_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
    q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
    k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
    dq *= spec.SCALE
    pairs *= spec.SCALE
    to_q = chunk_base(dquery, row, start, head, spec.T, spec.H, spec.K)
    to_k = chunk_base(dkey, row, start, head, spec.T, spec.H, spec.K)
    if spec.WIDTH > 1:
        # Gates of channels. dk collects its part as a key of both reads, since each halving adds to both gradients.
        dk, state_product = through_states(values, k_start, GATES, spec.H, BLOCK_K, BLOCK_V, spec)
        g = load_gates(g_base, k_start, BLOCK_K, spec)
        last = load_last_gates(g_base, k_start, BLOCK_K, spec)
        dq *= tl.exp2(g)
        dk *= tl.exp2(last[None, :] - g)
        state_product = state_product * tl.exp2(last) + tl.sum(dk * k.to(tl.float32), 0)
        # Before `channel_gradients`, whose factors above the diagonal are large but finite.
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
        dq, dk = channel_gradients(dq, dk, pairs, q, k, g, g_base, k_start, (q_base, k_base, start, end), BLOCK_K, spec)
        store_rows(to_q, dq, start, end, k_start, spec.H, spec.K, spec)
        dgate = dq * q.to(tl.float32)
        # The second read: the key as a query, with -dy in place of a cotangent.
        pairs, dr = read_gradients(y_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
        dr *= -tl.exp2(g)
        # A key reads what was written before it, not its own write: strictly below the diagonal.
        pairs = tl.where(strictly_earlier, -pairs, 0.0)
        dr, dk = answer_gradients(dr, dk, pairs, k, betas, g, g_base, k_start, (k_base, start, end), BLOCK_K, spec)
        store_tokens(dbeta, tl.sum(dr * k.to(tl.float32), 1), row, start, end, tile, K_TILES, head, spec)
        # Without beta for dbeta above, with it from here on: no gradient is divided by beta.
        dr *= betas[:, None]
        store_rows(to_k, dk + dr, start, end, k_start, spec.H, spec.K, spec)
        if GATES:
            # G_t is positive in the exponents of what token t reads, negative in those of what it wrote.
            dgate += (dr - dk) * k.to(tl.float32)
            # Reverse cumulative sum, from each token to the chunk's end: the total less what comes before.
            dgate = (tl.sum(dgate, 0) + state_product)[None, :] - (tl.cumsum(dgate, 0) - dgate)
            columns = k_start + tl.arange(0, BLOCK_K)
            valid = (rows > 0)[:, None] & (columns < spec.K)[None, :]
            previous = tl.load(g_base + ((rows - 1)[:, None] * spec.K + columns[None, :]), mask=valid, other=0.0)
            dgate = tl.where(g - previous < NO_GRADIENT_BELOW, 0.0, dgate)
            to = chunk_base(dgates, row, start, head, spec.T, spec.H, spec.K)
            store_rows(to, dgate, start, end, k_start, spec.H, spec.K, spec)
    else:
        if spec.WIDTH == 1:
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
        # The sign of r is taken here and where dk is stored; dr is -r until then.
        along = -tl.sum(dr * k.to(tl.float32), 1)
        store_tokens(dbeta, along, row, start, end, tile, K_TILES, head, spec)
        dgate += along * betas
        # The scores' gradients of the second read, with beta and the sign of r, for dk as a key of that read.
        answered = (pairs * -betas[:, None]).to(k.dtype)
        dk, state_product = through_states(values, k_start, GATES, spec.H, BLOCK_K, BLOCK_V, spec)
        if spec.WIDTH == 1:
            last = tl.load(g_base + (C - 1))
            dk *= tl.exp2(last - g)[:, None]
            state_product *= tl.exp2(last)
        if GATES:
            # Before dk has its parts from inside of the chunk: the last gate scales what passes through dS alone.
            last_dgate = tl.sum(state_product, 0) + tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0)
        dk = add_dot(dk, tl.trans(read), q, spec)
        dk = add_dot(dk, tl.trans(answered), k, spec)
        store_rows(to_k, dk - dr * betas[:, None], start, end, k_start, spec.H, spec.K, spec)
        if GATES:
            dgate -= tl.sum(dk * k.to(tl.float32), 1)
            # Reverse cumulative sum, from each token to the chunk's end: the total less what comes before.
            dgate = tl.sum(dgate, 0) + last_dgate - (tl.cumsum(dgate, 0) - dgate)
            previous = tl.load(g_base + rows - 1, mask=rows > 0, other=0.0)
            dgate = tl.where(g - previous < NO_GRADIENT_BELOW, 0.0, dgate)
            store_tokens(dgates, dgate, row, start, end, tile, K_TILES, head, spec)
