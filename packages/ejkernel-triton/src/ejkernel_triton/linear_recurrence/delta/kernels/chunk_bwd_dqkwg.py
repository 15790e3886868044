"""Computes gradients of queries, keys, gates and beta; the formulas are in `chunk_bwd_dhu`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import (
    NO_GRADIENT_BELOW,
    channel_gradients,
    through_states,
)
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_tokens
from ejkernel_triton.linear_recurrence.kernels.tile import (
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
    pair_weights,
    pairs_of,
    state_base,
    store_rows,
)


@triton.jit
def reload_key_tiles(k_base, start, end, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Reloads keys and cumulative gates of a chunk; see `reload_tiles`."""
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
    """Returns dr plus sum_j w_ijk pairs_ij k_jk, and dk plus sum_i w_ijk pairs_ij strength_i k_ik, with gates per key
    channel.

    This is `chunk_bwd_dqkg.channel_gradients` for keys that read earlier keys; pairs are 0 for j >= i.
    """
    k_base, start, end = tile_bases
    # Only the reading key is multiplied by beta: as a query it is beta k, as the key of a write k.
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
            # Loaded at each level, as in `channel_gradients`: kept through the loop they would spill.
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
    g_base = gates_base(gates, row, head, chunk, spec, per)
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
        # Gates per key channel. dk accumulates the gradient as a key of both reads, since each level adds to both
        # gradients.
        dk, state_product = through_states(values, k_start, GATES, spec.H, BLOCK_K, BLOCK_V, spec)
        g = load_gates(g_base, k_start, BLOCK_K, spec)
        last = load_last_gates(g_base, k_start, BLOCK_K, spec)
        dq *= tl.exp2(g)
        dk *= tl.exp2(last[None, :] - g)
        state_product = state_product * tl.exp2(last) + tl.sum(dk * k.to(tl.float32), 0)
        # Masked before `channel_gradients`, whose factors above the diagonal are large but finite.
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
        dq, dk = channel_gradients(dq, dk, pairs, q, k, g, g_base, k_start, (q_base, k_base, start, end), BLOCK_K, spec)
        store_rows(to_q, dq, start, end, k_start, spec.H, spec.K, spec)
        dgate = dq * q.to(tl.float32)
        # The second read: the key as a query, with -dy as its cotangent.
        pairs, dr = read_gradients(y_base, x_base, s_base, start, end, k_start, BLOCK_K, BLOCK_V, spec)
        dr *= -tl.exp2(g)
        # A key reads what earlier tokens wrote, not its own write: strictly below the diagonal.
        pairs = tl.where(strictly_earlier, -pairs, 0.0)
        dr, dk = answer_gradients(dr, dk, pairs, k, betas, g, g_base, k_start, (k_base, start, end), BLOCK_K, spec)
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
