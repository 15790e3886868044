# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Outputs of all chunks at the same time, each from the state before it and its own tokens.

o_i = scale (q_i exp2(G_i) S_0 + sum_{j <= i} (q_i exp2(G_i - G_j) k_j) dt_j v_j) + skip v_i

key channels    |  tile 0  |  tile 1  |          a program: one head, one chunk, BLOCK_V value channels
q, S_0       -> acc +=  q~ S_0                    in the loop over key channels
q, k         -> scores += q~ k~^T
scores, v    -> acc += (scores * weights) v       after it
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.tile import (
    channel_scores,
    chunk_base,
    chunk_span,
    gates_base,
    load_dt,
    load_gates,
    load_rows,
    load_state,
    pair_weights,
    scores_at,
    state_base,
    store_rows,
)


@triton.jit
def scores_kernel(
    query,
    key,
    gates,
    bounds,
    firsts,
    owners,
    scores,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sum_k q_ik exp2(G_ik - G_jk) k_jk of one head's chunk for j <= i, with gates of channels; else 0."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(bounds, firsts, owners, row, chunk, spec, per)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    made = tl.zeros([C, C], tl.float32)
    for k in tl.range(0, spec.K, BLOCK_K):
        q = load_rows(q_base, start, end, k, spec.HQ, spec.K, BLOCK_K, spec)
        a = load_rows(k_base, start, end, k, spec.HK, spec.K, BLOCK_K, spec)
        g = load_gates(g_base, k, BLOCK_K, spec)
        made = channel_scores(made, q, a, g, g_base, k, BLOCK_K, spec)
    tl.store(scores_at(scores, row, head, chunk, spec), made.to(scores.dtype.element_ty))


@triton.jit
def outputs_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    states,
    bounds,
    firsts,
    owners,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One chunk's output of one head and BLOCK_V value channels; see `stages.make_outputs`."""
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    v = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    # Heads next to each other run together: those that share queries, keys or values find them in L2.
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(bounds, firsts, owners, row, chunk, spec, per)
    rows = tl.arange(0, C)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    v_head = head // (spec.H // VALUE_HEADS)
    v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
    s_base = state_base(states, row, head, chunk, spec)
    acc = tl.zeros([C, BLOCK_V], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    for k in tl.range(0, spec.K, BLOCK_K):
        q = load_rows(q_base, start, end, k, spec.HQ, spec.K, BLOCK_K, spec)
        s = load_state(s_base, k, v, BLOCK_K, BLOCK_V, spec)
        if spec.WIDTH > 1:
            g = load_gates(gates_base(gates, row, head, chunk, spec, per), k, BLOCK_K, spec)
            acc = add_dot(acc, (q.to(tl.float32) * tl.exp2(g)).to(s.dtype), s, spec)
        else:
            a = load_rows(k_base, start, end, k, spec.HK, spec.K, BLOCK_K, spec)
            pairs = add_dot(pairs, q, tl.trans(a), spec)
            acc = add_dot(acc, q.to(s.dtype), s, spec)
    if spec.WIDTH > 1:
        pairs = tl.load(scores_at(scores, row, head, chunk, spec))
    if spec.WIDTH == 1:
        g = tl.load(gates_base(gates, row, head, chunk, spec, per) + rows)
        acc *= tl.exp2(g)[:, None]
        pairs *= pair_weights(g, spec)
    if spec.WIDTH == 0:
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    if spec.DT:
        pairs = pairs.to(tl.float32) * load_dt(dt, row // per.DT, start, end, head, spec)[None, :]
    b = load_rows(v_base, start, end, v, VALUE_HEADS, spec.V, BLOCK_V, spec)
    acc = add_dot(acc, pairs.to(b.dtype), b, spec) * spec.SCALE
    if spec.SKIP:
        acc += b.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
    store_rows(chunk_base(output, row, start, head, spec.T, spec.H, spec.V), acc, start, end, v, spec.H, spec.V, spec)
