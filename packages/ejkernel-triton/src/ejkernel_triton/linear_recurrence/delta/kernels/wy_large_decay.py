"""Computes the WY form of chunks whose gates per key channel decay too much for `wy_channel_gates`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.delta.kernels.wy_channel_gates import (
    decayed,
    load_log_gates,
    solve_chunk,
    store_factors,
    store_scores,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    cut_weights,
    diagonal,
    factors_base,
    load_gates,
    load_rows,
    pairs_of,
    store_rows,
)


@triton.jit
def halved_pairs(read, seen, q_base, k_base, g_base, start, end, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Adds products of queries and keys, and of keys and keys, level by level; see `tile.channel_scores`."""
    q = load_rows(q_base, start, end, column, spec.HQ, spec.K, COLUMNS, spec)
    k = load_rows(k_base, start, end, column, spec.HK, spec.K, COLUMNS, spec)
    read += tl.where(diagonal(spec), tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None], 0.0)
    LEVELS: tl.constexpr = spec.LEVELS
    for level in tl.range(0, LEVELS, num_stages=1):
        # The opaque offset of 0 forces the tiles to be reloaded from the cache at each level: kept through the loop
        # they would spill.
        opaque_zero = level >> 5
        gates = load_gates(g_base + opaque_zero, column, COLUMNS, spec)
        weights = cut_weights(gates, g_base, column, level, COLUMNS, spec)
        k = decayed(load_rows(k_base + opaque_zero, start, end, column, spec.HK, spec.K, COLUMNS, spec), weights)
        q = decayed(load_rows(q_base + opaque_zero, start, end, column, spec.HQ, spec.K, COLUMNS, spec), weights)
        read += tl.where(pairs_of(level, spec), dot(q, tl.trans(k), spec), 0.0)
        seen += tl.where(pairs_of(level, spec), dot(k, tl.trans(k), spec), 0.0)
    return read, seen


@triton.jit
def wy_large_decay_kernel(
    query,
    key,
    value,
    decay,
    beta,
    starts,
    ends,
    exponents,
    old_u,
    old_w,
    old_inverse,
    old_scores,
    old_query,
    old_key,
    old_factors,
    u,
    w,
    inverse,
    scores,
    decayed_query,
    decayed_key,
    factors,
    cumulative,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Recomputes the chunks of large decay among GROUP chunks of a head.

    The outputs alias those of `wy_channel_gates_kernel`; other chunks are not touched. `cumulative` is scratch of this
    program.
    """
    C: tl.constexpr = spec.CHUNK
    GROUPS: tl.constexpr = (spec.CHUNKS + GROUP - 1) // GROUP
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    first = (program % GROUPS) * GROUP
    row = program // GROUPS
    rows = tl.arange(0, C)
    of_head = (tl.cast(row, tl.int64) * spec.H + head) * spec.CHUNKS
    # Each program checks several chunks: with one program per chunk, most would only load a number and end. Loop
    # invariants are recomputed in each iteration: hoisted they would take registers, and 24 bytes per thread spill.
    for chunk in tl.range(first, tl.minimum(first + GROUP, spec.CHUNKS), num_stages=1, disable_licm=True):
        if tl.load(exponents + of_head + chunk) >= spec.MAX_EXPONENT:
            start, end = chunk_span(starts, ends, row, chunk, spec, per)
            q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
            k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
            d_base = chunk_base(decay, row // per.DECAY, start * (T > 1), head, T, spec.H, spec.K)
            D_STRIDE: tl.constexpr = (T > 1) * spec.H * spec.K
            w_to = chunk_base(w, row, start, head, spec.T, spec.H, spec.K)
            q_to = chunk_base(decayed_query, row, start, head, spec.T, spec.H, spec.K)
            k_to = chunk_base(decayed_key, row, start, head, spec.T, spec.H, spec.K)
            f_base = factors_base(factors, row, head, chunk, spec)
            g_base = cumulative + (of_head + chunk) * (C * spec.K)
            read = tl.zeros([C, C], tl.float32)
            seen = tl.zeros([C, C], tl.float32)
            for k_start in tl.range(0, spec.K, BLOCK_K):
                columns = k_start + tl.arange(0, BLOCK_K)
                g = tl.cumsum(load_log_gates(d_base, start, end, k_start, D_STRIDE, BLOCK_K, spec), 0)
                total = tl.sum(tl.where((rows == C - 1)[:, None], g, 0.0), 0)
                store_factors(f_base, tl.zeros_like(total), total, tl.zeros_like(total), k_start, BLOCK_K, spec)
                # The position of the cuts depends on the level, and registers cannot be indexed: levels read the gates
                # from memory.
                at = g_base + (rows[:, None] * spec.K + columns[None, :])
                tl.store(at, g, mask=(columns < spec.K)[None, :])
                q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
                k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
                store_rows(q_to, decayed(q, tl.exp2(g)), start, end, k_start, spec.H, spec.K, spec)
                store_rows(k_to, decayed(k, tl.exp2(total[None, :] - g)), start, end, k_start, spec.H, spec.K, spec)
                store_rows(w_to, decayed(k, tl.exp2(g)), start, end, k_start, spec.H, spec.K, spec)
                tl.debug_barrier()  # other threads wrote the gates that a thread reads
                read, seen = halved_pairs(read, seen, q_base, k_base, g_base, start, end, k_start, BLOCK_K, spec)
            store_scores(scores, read, row, head, chunk, spec)
            arrays = (beta, value, u, w, inverse)
            solve_chunk(seen, arrays, (row, head, chunk, start, end), spec, per, BLOCK_K, BLOCK_V, KEEP)
