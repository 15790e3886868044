# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Gradients of all chunks at the same time, each from the state S_0 before it and the gradient dS of the one after it.

With A_ij = w_ij <q_i, k_j>, w_ij = exp2(G_i - G_j) for j <= i, dP_ij = scale <do_i, v_j>, and T the chunk's last token:

    dv_j = scale sum_i A_ij do_i + (k_j exp2(G_T - G_j)) dS
    dq_i = scale exp2(G_i) S_0 do_i + sum_j w_ij dP_ij k_j
    dk_j = sum_i w_ij dP_ij q_i + exp2(G_T - G_j) dS v_j
    dG_t = q_t dq_t - k_t dk_t, and for t = T: <dS, exp2(G_T) S_0> + sum_j <k_j, its part of dk_j through dS>
    dg_t = sum_{i >= t} dG_i

where v_j is dt_j v_j: its gradient times v_j is that of dt_j. The sum over i stays inside of the chunk: what a gate
does to later chunks is in dS.

    value_gradients_kernel    a program: one chunk, BLOCK_V value channels; loops over heads that share values
    key_gradients_kernel      a program: one chunk, BLOCK_K key channels; loops over heads that share queries or keys

Nothing is added up in memory: programs that have a part each write their parts, which are added in a fixed order.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.tile import (
    chunk_base,
    chunk_span,
    cut_weights,
    diagonal,
    from_middle,
    gates_base,
    load_dt,
    load_gates,
    load_last_gates,
    load_rows,
    load_state,
    pair_weights,
    pairs_of,
    scores_at,
    state_base,
    store_rows,
)

STRONG = tl.constexpr(-57.5)
"""Gates below, in powers of two, are the same to the kernels (see `gates_kernel`) and have no gradient."""


@triton.jit
def store_tokens(base, numbers, row, start, end, part, PARTS: tl.constexpr, head, spec: tl.constexpr):
    """Writes [CHUNK] numbers of a head to [rows, PARTS, T, H]."""
    rows = tl.arange(0, spec.CHUNK)
    at = base + ((tl.cast(row, tl.int64) * PARTS + part) * spec.T + start) * spec.H + head
    tl.store(at + rows * spec.H, numbers.to(base.dtype.element_ty), mask=start + rows < end)


@triton.jit
def value_gradients_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    cotangent,
    dstates,
    bounds,
    firsts,
    owners,
    dvalue,
    ddt,
    dskip,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Gradients of one chunk's values, dt and skip; see `stages.value_gradients`."""
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    GROUPS: tl.constexpr = spec.H // SHARED
    program = tl.program_id(0)
    tile = program % V_TILES
    v = tile * BLOCK_V
    program = program // V_TILES
    group = program % GROUPS
    program = program // GROUPS
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(bounds, firsts, owners, row, chunk, spec, per)
    rows = tl.arange(0, C)
    total = tl.zeros([C, BLOCK_V], tl.float32)
    for member in tl.range(0, SHARED):
        head = group * SHARED + member
        q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
        s_base = state_base(dstates, row, head, chunk, spec)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        through = tl.zeros([C, BLOCK_V], tl.float32)
        pairs = tl.zeros([C, C], tl.float32)  # by (key, query)
        for k in tl.range(0, spec.K, BLOCK_K):
            a = load_rows(k_base, start, end, k, spec.HK, spec.K, BLOCK_K, spec)
            s = load_state(s_base, k, v, BLOCK_K, BLOCK_V, spec)
            if spec.WIDTH > 1:
                g = load_gates(g_base, k, BLOCK_K, spec)
                until = tl.exp2(load_last_gates(g_base, k, BLOCK_K, spec)[None, :] - g)
                through = add_dot(through, (a.to(tl.float32) * until).to(s.dtype), s, spec)
            else:
                q = load_rows(q_base, start, end, k, spec.HQ, spec.K, BLOCK_K, spec)
                pairs = add_dot(pairs, a, tl.trans(q), spec)
                through = add_dot(through, a.to(s.dtype), s, spec)
        if spec.WIDTH > 1:
            pairs = tl.trans(tl.load(scores_at(scores, row, head, chunk, spec))).to(tl.float32)
        if spec.WIDTH == 1:
            g = tl.load(g_base + rows)
            through *= tl.exp2(tl.load(g_base + (C - 1)) - g)[:, None]
            between = tl.where(rows[None, :] >= rows[:, None], g[None, :] - g[:, None], float("-inf"))
            pairs *= tl.exp2(between)
        if spec.WIDTH == 0:
            pairs = tl.where(rows[None, :] >= rows[:, None], pairs, 0.0)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        do = load_rows(o_base, start, end, v, spec.H, spec.V, BLOCK_V, spec)
        through = add_dot(through, (pairs * spec.SCALE).to(do.dtype), do, spec)
        if spec.DT or spec.SKIP:
            v_head = head // (spec.H // VALUE_HEADS)
            v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
            b = load_rows(v_base, start, end, v, VALUE_HEADS, spec.V, BLOCK_V, spec).to(tl.float32)
            if spec.DT:
                store_tokens(ddt, tl.sum(through * b, 1), row, start, end, tile, V_TILES, head, spec)
                through *= load_dt(dt, row // per.DT, start, end, head, spec)[:, None]
            if spec.SKIP:
                store_tokens(dskip, tl.sum(do.to(tl.float32) * b, 1), row, start, end, tile, V_TILES, head, spec)
                through += do.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
        total += through
    at = chunk_base(dvalue, row, start, group, spec.T, GROUPS, spec.V)
    store_rows(at, total, start, end, v, GROUPS, spec.V, spec)


@triton.jit
def load_again(rows_of, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Queries, keys and cumulative gates of a chunk, from where they lie and no sooner than it is asked for."""
    q_base, a_base, start, end = rows_of
    none = level >> 5  # 0, which the compiler cannot fold
    q = load_rows(q_base + none, start, end, column, spec.HQ, spec.K, COLUMNS, spec)
    k = load_rows(a_base + none, start, end, column, spec.HK, spec.K, COLUMNS, spec)
    return q.to(tl.float32), k.to(tl.float32), load_gates(base + none, column, COLUMNS, spec)


@triton.jit
def channel_gradients(
    dq,
    dk,
    pairs,
    query,
    key,
    gates,
    base,
    column,
    rows_of,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """dq plus sum_j w_ijk pairs_ij k_jk, and dk plus sum_i w_ijk pairs_ij q_ik.

    See `channel_scores`, whose transposed products these are.

    Args:
        dq: [CHUNK, COLUMNS] float32.
        dk: Likewise.
        pairs: [CHUNK, CHUNK] float32, gradients of the scores by (i, j), 0 for j > i.
        query: [CHUNK, COLUMNS].
        key: [CHUNK, COLUMNS].
        gates: [CHUNK, COLUMNS] cumulative gates.
        base: Where they lie.
        column: First key channel.
        rows_of: Where queries and keys lie, the chunk's first token and its sequence's end.
    """
    apart, weak = from_middle(gates, base, column, COLUMNS, spec)
    q, k = query.to(tl.float32), key.to(tl.float32)
    if weak:
        own = pairs.to(query.dtype)
        since, until = tl.exp2(apart), tl.exp2(-apart)
        dq += since * dot(own, (k * until).to(key.dtype), spec)
        dk += until * dot(tl.trans(own), (q * since).to(query.dtype), spec)
    else:
        alone = tl.sum(tl.where(diagonal(spec), pairs, 0.0), 1)[:, None]
        dq += alone * k
        dk += alone * q
        LEVELS: tl.constexpr = spec.LEVELS
        for level in tl.range(0, LEVELS, num_stages=1):
            # Read again: registers have no room for what the loop does not change.
            q, k, g = load_again(rows_of, base, column, level, COLUMNS, spec)
            weights = cut_weights(g, base, column, level, COLUMNS, spec)
            own = tl.where(pairs_of(level, spec), pairs, 0.0).to(query.dtype)
            dq += weights * dot(own, (k * weights).to(key.dtype), spec)
            dk += weights * dot(tl.trans(own), (q * weights).to(query.dtype), spec)
    return dq, dk


@triton.jit
def through_states(
    values,
    k,
    GATES: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    spec: tl.constexpr,
):
    """dS v_j of a chunk's tokens, [CHUNK, BLOCK_K], and <dS, S_0> of each key channel if GATES.

    Args:
        values: Where values, S_0 and dS lie, the chunk's first token and its sequence's end.
        k: First key channel.
    """
    v_base, s_base, d_base, start, end = values
    C: tl.constexpr = spec.CHUNK
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    kept = tl.zeros([BLOCK_K], tl.float32)
    for v in tl.range(0, spec.V, BLOCK_V):
        b = load_rows(v_base, start, end, v, VALUE_HEADS, spec.V, BLOCK_V, spec)
        ds = load_state(d_base, k, v, BLOCK_K, BLOCK_V, spec)
        dk = add_dot(dk, b.to(ds.dtype), tl.trans(ds), spec)
        if GATES:
            s = load_state(s_base, k, v, BLOCK_K, BLOCK_V, spec)
            kept += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return dk, kept


@triton.jit
def key_gradients_kernel(
    query,
    key,
    value,
    gates,
    dt,
    cotangent,
    states,
    dstates,
    bounds,
    firsts,
    owners,
    dquery,
    dkey,
    dgates,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARED: tl.constexpr,
    GATES: tl.constexpr,
):
    """Gradients of one chunk's queries, keys and gates; see `stages.key_gradients`."""
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    C: tl.constexpr = spec.CHUNK
    GROUPS: tl.constexpr = spec.H // SHARED
    # Of queries and keys, those with a head each are written head by head, and the shared ones after the loop.
    Q_HEADS: tl.constexpr = spec.H if spec.HQ == spec.H else GROUPS
    A_HEADS: tl.constexpr = spec.H if spec.HK == spec.H else GROUPS
    program = tl.program_id(0)
    tile = program % K_TILES
    k = tile * BLOCK_K
    program = program // K_TILES
    group = program % GROUPS
    program = program // GROUPS
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(bounds, firsts, owners, row, chunk, spec, per)
    rows = tl.arange(0, C)
    sum_q = tl.zeros([C, BLOCK_K], tl.float32)
    sum_k = tl.zeros([C, BLOCK_K], tl.float32)
    for member in tl.range(0, SHARED):
        head = group * SHARED + member
        v_head = head // (spec.H // VALUE_HEADS)
        v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        s_base = state_base(states, row, head, chunk, spec)
        d_base = state_base(dstates, row, head, chunk, spec)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        pairs = tl.zeros([C, C], tl.float32)
        dq = tl.zeros([C, BLOCK_K], tl.float32)
        for v in tl.range(0, spec.V, BLOCK_V):
            do = load_rows(o_base, start, end, v, spec.H, spec.V, BLOCK_V, spec)
            b = load_rows(v_base, start, end, v, VALUE_HEADS, spec.V, BLOCK_V, spec)
            s = load_state(s_base, k, v, BLOCK_K, BLOCK_V, spec)
            pairs = add_dot(pairs, do, tl.trans(b), spec)
            dq = add_dot(dq, do.to(s.dtype), tl.trans(s), spec)
        values = (v_base, s_base, d_base, start, end)
        q_head = head // (spec.H // spec.HQ)
        a_head = head // (spec.H // spec.HK)
        q_base = chunk_base(query, row // per.QUERY, start, q_head, spec.T, spec.HQ, spec.K)
        a_base = chunk_base(key, row // per.KEY, start, a_head, spec.T, spec.HK, spec.K)
        q = load_rows(q_base, start, end, k, spec.HQ, spec.K, BLOCK_K, spec)
        a = load_rows(a_base, start, end, k, spec.HK, spec.K, BLOCK_K, spec)
        dq *= spec.SCALE
        pairs *= spec.SCALE
        if spec.DT:
            factors = load_dt(dt, row // per.DT, start, end, head, spec)
            pairs *= factors[None, :]
        if spec.WIDTH > 1:
            dk, kept = through_states(values, k, GATES, VALUE_HEADS, BLOCK_K, BLOCK_V, spec)
            if spec.DT:
                dk *= factors[:, None]
            g = load_gates(g_base, k, BLOCK_K, spec)
            last = load_last_gates(g_base, k, BLOCK_K, spec)
            dq *= tl.exp2(g)
            dk *= tl.exp2(last[None, :] - g)
            kept = kept * tl.exp2(last) + tl.sum(dk * a.to(tl.float32), 0)
            pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
            dq, dk = channel_gradients(dq, dk, pairs, q, a, g, g_base, k, (q_base, a_base, start, end), BLOCK_K, spec)
            if GATES:
                change = dq * q.to(tl.float32) - dk * a.to(tl.float32)
                # From each token to the chunk's end: all but what is before it.
                change = (tl.sum(change, 0) + kept)[None, :] - (tl.cumsum(change, 0) - change)
                columns = k + tl.arange(0, BLOCK_K)
                valid = (rows > 0)[:, None] & (columns < spec.K)[None, :]
                before = tl.load(g_base + ((rows - 1)[:, None] * spec.K + columns[None, :]), mask=valid, other=0.0)
                change = tl.where(g - before < STRONG, 0.0, change)
                at = chunk_base(dgates, row, start, head, spec.T, spec.H, spec.K)
                store_rows(at, change, start, end, k, spec.H, spec.K, spec)
        else:
            if spec.WIDTH == 1:
                g = tl.load(g_base + rows)
                dq *= tl.exp2(g)[:, None]
                pairs *= pair_weights(g)
            else:
                pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
            low = pairs.to(q.dtype)
            dq = add_dot(dq, low, a, spec)
            # The queries are done with before the keys begin: registers have no room for both.
            if GATES:
                change = tl.sum(dq * q.to(tl.float32), 1)
            if spec.HQ == spec.H:
                at = chunk_base(dquery, row, start, head, spec.T, Q_HEADS, spec.K)
                store_rows(at, dq, start, end, k, Q_HEADS, spec.K, spec)
            else:
                sum_q += dq
            dk, kept = through_states(values, k, GATES, VALUE_HEADS, BLOCK_K, BLOCK_V, spec)
            if spec.DT:
                dk *= factors[:, None]
            if spec.WIDTH == 1:
                last = tl.load(g_base + (C - 1))
                dk *= tl.exp2(last - g)[:, None]
                kept *= tl.exp2(last)
            if GATES:
                kept_sum = tl.sum(kept, 0) + tl.sum(tl.sum(dk * a.to(tl.float32), 1), 0)
            dk = add_dot(dk, tl.trans(low), q, spec)
            if GATES:
                change -= tl.sum(dk * a.to(tl.float32), 1)
                change = tl.sum(change, 0) + kept_sum - (tl.cumsum(change, 0) - change)
                if spec.WIDTH == 1:
                    before = tl.load(g_base + rows - 1, mask=rows > 0, other=0.0)
                    change = tl.where(g - before < STRONG, 0.0, change)
                store_tokens(dgates, change, row, start, end, tile, K_TILES, head, spec)
        if spec.WIDTH > 1:
            if spec.HQ == spec.H:
                at = chunk_base(dquery, row, start, head, spec.T, Q_HEADS, spec.K)
                store_rows(at, dq, start, end, k, Q_HEADS, spec.K, spec)
            else:
                sum_q += dq
        if spec.HK == spec.H:
            at = chunk_base(dkey, row, start, head, spec.T, A_HEADS, spec.K)
            store_rows(at, dk, start, end, k, A_HEADS, spec.K, spec)
        else:
            sum_k += dk
    if spec.HQ != spec.H:
        at = chunk_base(dquery, row, start, group, spec.T, Q_HEADS, spec.K)
        store_rows(at, sum_q, start, end, k, Q_HEADS, spec.K, spec)
    if spec.HK != spec.H:
        at = chunk_base(dkey, row, start, group, spec.T, A_HEADS, spec.K)
        store_rows(at, sum_k, start, end, k, A_HEADS, spec.K, spec)
