"""Computes the WY form with gates per key channel, in one kernel that reads the gates once.

Cumulative gates take as many bytes as queries and keys together. So they are not stored for other kernels: operands
that read the state or are written to it are stored with their decay, of which none is above 1:

    in a loop over key channels
        decay      -> G, G_T - G
        q, k       -> q exp2(G), k exp2(G), k exp2(G_T - G)                 stored
        q, k, decay -> pairs of queries and keys, pairs of keys and keys    see `sub_chunk_scores`
    pairs          -> scores, and L -> (I + L)^-1                           see `wy_fast`
    V              -> U
    k exp2(G), reloaded from W's memory  -> W

The kernels that read the state apply the decay of a chunk, exp2(G_T), in registers.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.delta.kernels.solve_tril import solve_tril
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    SINCE_START,
    UNTIL_END,
    decayed,
    gate_operands,
    gate_sums,
    load_log_gates,
    sub_chunk_scores,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    causal,
    chunk_base,
    chunk_span,
    load_dt,
    load_rows,
    scores_at,
    store_rows,
)


@triton.jit
def store_scores(scores, read, row, head, chunk, spec: tl.constexpr):
    """Stores scores of queries and keys, 0 above the diagonal."""
    tl.store(scores_at(scores, row, head, chunk, spec), tl.where(causal(spec), read, 0.0).to(scores.dtype.element_ty))


@triton.jit
def solve_chunk(
    seen,
    arrays,
    place,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Computes U and W of one head's chunk, and (I + L)^-1 if KEEP, from unmasked products of keys and keys.

    `w` has the decayed keys, which W replaces.
    """
    row, head, chunk, start, end = place
    beta, value, u, w, inverse = arrays
    rows = tl.arange(0, spec.CHUNK)
    # 0 past the end: rows of L are 0 there, and the inverse has rows of I.
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    lower = tl.where(rows[:, None] > rows[None, :], seen * betas[:, None], 0.0)
    unit_inverted = solve_tril(lower, spec)
    if KEEP:
        tl.store(scores_at(inverse, row, head, chunk, spec), unit_inverted.to(inverse.dtype.element_ty))
    ut = (unit_inverted * betas[None, :]).to(value.dtype.element_ty)
    v_base = chunk_base(value, row // per.VALUE, start, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V)
    u_to = chunk_base(u, row, start, head, spec.T, spec.H, spec.V)
    w_to = chunk_base(w, row, start, head, spec.T, spec.H, spec.K)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_rows(v_base, start, end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        store_rows(u_to, dot(ut, v, spec), start, end, v_start, spec.H, spec.V, spec)
    tl.debug_barrier()  # other threads wrote the keys that a thread reads
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_rows(w_to, start, end, k_start, spec.H, spec.K, BLOCK_K, spec)
        made = dot(ut, k, spec)
        tl.debug_barrier()  # all threads have read their keys before W overwrites them
        store_rows(w_to, made, start, end, k_start, spec.H, spec.K, spec)


@triton.jit
def wy_channel_gates_kernel(
    query,
    key,
    value,
    decay,
    beta,
    signs,
    starts,
    ends,
    u,
    w,
    inverse,
    scores,
    decayed_query,
    decayed_key,
    totals,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Computes all of one head's chunk; T is 1 for a decay that is the same for all tokens.

    See `forward.wy_channel_gates`.
    """
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    d_base = chunk_base(decay, row // per.DECAY, start * (T > 1), head, T, spec.H, spec.K)
    D_STRIDE: tl.constexpr = (T > 1) * spec.H * spec.K
    w_to = chunk_base(w, row, start, head, spec.T, spec.H, spec.K)
    q_to = chunk_base(decayed_query, row, start, head, spec.T, spec.H, spec.K)
    k_to = chunk_base(decayed_key, row, start, head, spec.T, spec.H, spec.K)
    total_to = totals + ((tl.cast(row, tl.int64) * spec.H + head) * spec.CHUNKS + chunk) * spec.K
    read = tl.zeros([C, C], tl.float32)
    seen = tl.zeros([C, C], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K, num_stages=1, disable_licm=True):
        gates = load_log_gates(d_base, start, end, k_start, D_STRIDE, BLOCK_K, spec)
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        columns = k_start + tl.arange(0, BLOCK_K)
        tl.store(total_to + columns, tl.sum(gates, 0), mask=columns < spec.K)
        high, low = gate_operands(gates, k.dtype)
        until = tl.exp2(gate_sums(signs, UNTIL_END, high, low, spec))
        store_rows(k_to, decayed(k, until), start, end, k_start, spec.H, spec.K, spec)
        since = tl.exp2(gate_sums(signs, SINCE_START, high, low, spec))
        store_rows(q_to, decayed(q, since), start, end, k_start, spec.H, spec.K, spec)
        store_rows(w_to, decayed(k, since), start, end, k_start, spec.H, spec.K, spec)
        read, seen = sub_chunk_scores(read, seen, q, k, high, low, signs, spec)
    store_scores(scores, read, row, head, chunk, spec)
    arrays = (beta, value, u, w, inverse)
    solve_chunk(seen, arrays, (row, head, chunk, start, end), spec, per, BLOCK_K, BLOCK_V, KEEP)
