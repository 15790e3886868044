"""Computes gradients of all chunks in parallel, each from the state S_0 before it and the gradient dS of the state
after it.

With A_ij = w_ij <q_i, k_j>, w_ij = exp2(G_i - G_j) for j <= i, dP_ij = scale <do_i, v_j>, and T the chunk's last token:

    dv_j = scale sum_i A_ij do_i + (k_j exp2(G_T - G_j)) dS
    dq_i = scale exp2(G_i) S_0 do_i + sum_j w_ij dP_ij k_j
    dk_j = sum_i w_ij dP_ij q_i + exp2(G_T - G_j) dS v_j
    dG_t = q_t dq_t - k_t dk_t, and for t = T: <dS, exp2(G_T) S_0> + sum_j <k_j, the term of dk_j with dS>
    dg_t = sum_{i >= t} dG_i

where v_j stands for dt_j v_j: its gradient times v_j is that of dt_j. The sum over i stays inside the chunk: the effect
of a gate on later chunks is in dS.

    chunk_bwd_dv_kernel      a program: one chunk, BLOCK_V value channels; loops over heads that share values
    chunk_bwd_dqkg_kernel    a program: one chunk, BLOCK_K key channels; loops over heads that share queries or keys

There are no atomics: programs that share a gradient store partial sums, which are added in a fixed order, so results
are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    constant_gate,
    decay_until_end,
    gates_base,
    head_gates,
    last_head_gate,
    load_dt,
    load_gates,
    load_last_gates,
    load_rows,
    load_state,
    scores_at,
    state_base,
    store_rows,
)


@triton.jit
def store_tokens(base, numbers, row, start, end, part, PARTS: tl.constexpr, head, spec: tl.constexpr):
    """Stores [CHUNK] elements of a head to [rows, PARTS, T, H]."""
    rows = tl.arange(0, spec.CHUNK)
    at = base + ((tl.cast(row, tl.int64) * PARTS + part) * spec.T + start) * spec.H + head
    tl.store(at + rows * spec.H, numbers.to(base.dtype.element_ty), mask=start + rows < end)


@triton.jit
def chunk_bwd_dv_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    cotangent,
    dstates,
    starts,
    ends,
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
    """Computes the gradients of one chunk's values, dt and skip; see `backward.value_gradients`."""
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    GROUPS: tl.constexpr = spec.H // SHARED
    program = tl.program_id(0)
    tile = program % V_TILES
    v_start = tile * BLOCK_V
    program = program // V_TILES
    group = program % GROUPS
    program = program // GROUPS
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, C)
    # Heads that share a value are added up here, one after the other, in a fixed order and without atomics.
    dv_sum = tl.zeros([C, BLOCK_V], tl.float32)
    for member in tl.range(0, SHARED):
        head = group * SHARED + member
        q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
        s_base = state_base(dstates, row, head, chunk, spec)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        dv = tl.zeros([C, BLOCK_V], tl.float32)
        pairs = tl.zeros([C, C], tl.float32)  # by (key, query)
        for k_start in tl.range(0, spec.K, BLOCK_K):
            k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
            s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            if spec.WIDTH > 1:
                g = load_gates(g_base, k_start, BLOCK_K, spec)
                # Decay from a token to the chunk's end, at most 1.
                decay_until = tl.exp2(load_last_gates(g_base, k_start, BLOCK_K, spec)[None, :] - g)
                dv = add_dot(dv, (k.to(tl.float32) * decay_until).to(s.dtype), s, spec)
            else:
                q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
                # By (key, query), so that it is a left operand below without a transposition in registers.
                pairs = add_dot(pairs, k, tl.trans(q), spec)
                dv = add_dot(dv, k.to(s.dtype), s, spec)
        if spec.WIDTH > 1:
            # Scores from the forward pass are by (query, key), and 0 above the diagonal.
            pairs = tl.trans(tl.load(scores_at(scores, row, head, chunk, spec))).to(tl.float32)
        if spec.WIDTH == 1:
            constant = constant_gate(gates, row, head, spec, per)
            g = head_gates(g_base, constant, 0, C, spec)
            dv *= decay_until_end(last_head_gate(g_base, constant, end - start, spec), g, spec)[:, None]
            # Masked before exp2, as in `pair_weights`: earlier queries would overflow.
            between = tl.where(rows[None, :] >= rows[:, None], g[None, :] - g[:, None], float("-inf"))
            pairs *= tl.exp2(between)
        if spec.WIDTH == 0:
            pairs = tl.where(rows[None, :] >= rows[:, None], pairs, 0.0)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        # Masked pairs are 0 in `pairs`; cotangents past the end are 0 too, so rows past the end give no 0 x NaN.
        dv = add_dot(dv, (pairs * spec.SCALE).to(do.dtype), do, spec)
        if spec.DT or spec.SKIP:
            v_head = head // (spec.H // VALUE_HEADS)
            v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
            v = load_rows(v_base, start, end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec).to(tl.float32)
            if spec.DT:
                # Here dv is the gradient of dt v: its product with v is the gradient of dt, that with dt the gradient
                # of v. The sum is over this tile's channels; XLA adds up the tiles.
                store_tokens(ddt, tl.sum(dv * v, 1), row, start, end, tile, V_TILES, head, spec)
                dv *= load_dt(dt, row // per.DT, start, end, head, spec)[:, None]
            if spec.SKIP:
                store_tokens(dskip, tl.sum(do.to(tl.float32) * v, 1), row, start, end, tile, V_TILES, head, spec)
                dv += do.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
        dv_sum += dv
    at = chunk_base(dvalue, row, start, group, spec.T, GROUPS, spec.V)
    store_rows(at, dv_sum, start, end, v_start, GROUPS, spec.V, spec)
