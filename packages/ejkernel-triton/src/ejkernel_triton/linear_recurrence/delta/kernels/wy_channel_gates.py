"""Computes the WY form with gates per key channel, in one kernel that reads the gates once.

Cumulative gates take as many bytes as queries and keys together. So they are not stored for other kernels: operands
that read the state or are written to it are stored with their decay, relative to the chunk's middle M:

    in a loop over key channels
        decay      -> G - G_M
        q, k       -> q exp2(G - G_M), k exp2(G - G_M), k exp2(G_M - G)     stored, and operands of the pairs
                   -> pairs of queries and keys, pairs of keys and keys
    pairs          -> scores, and L -> (I + L)^-1                           see `wy_fast`
    V              -> U
    k exp2(G - G_M), reloaded from W's memory  -> W

The kernels that read the state apply its decay to the middle in registers: exp2(G_M) before the chunk reads it,
exp2(G_T - G_M) after its keys are added.

If gates are so strong that those factors overflow, a second kernel recomputes the chunk: queries and the keys of W have
exp2(G), other keys exp2(G_T - G), scores are computed level by level (`tile.channel_scores`), and the state decays by
exp2(G_T) between reads and keys. It does not touch other chunks. As a branch of the first kernel it would add to its
registers, and spill. `factors` has the state's three log2 decays per channel: before it is read, before and after keys
are added to it.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.delta.kernels.solve_tril import solve_tril
from ejkernel_triton.linear_recurrence.kernels.tile import (
    causal,
    chunk_base,
    chunk_span,
    factors_base,
    load_dt,
    load_rows,
    masked_load,
    powers_of_two,
    scores_at,
    store_rows,
)


@triton.jit
def sums_from_middle(gates, dtype: tl.constexpr, spec: tl.constexpr):
    """Returns sums of gates from the chunk's middle to each token, negated before the middle: [CHUNK, COLUMNS] float32.

    They are a product with a matrix of 0, 1 and -1. A scan along tokens takes several times as many instructions.
    """
    token, summed = tl.arange(0, spec.CHUNK)[:, None], tl.arange(0, spec.CHUNK)[None, :]
    later = summed >= spec.CHUNK // 2
    signs = ((summed <= token) & later).to(tl.float32) - ((summed > token) & (summed < spec.CHUNK // 2)).to(tl.float32)
    if dtype == tl.float32:
        return dot(signs, gates, spec)
    else:
        # Two bfloat16 parts of each gate: more digits than its 16-bit factors have, and all sums use the same rounded
        # gates.
        signs = signs.to(tl.bfloat16)
        high = gates.to(tl.bfloat16)
        return add_dot(dot(signs, high, spec), signs, (gates - high.to(tl.float32)).to(tl.bfloat16), spec)


@triton.jit
def load_log_gates(base, start, end, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [CHUNK, COLUMNS] log2 gates of a chunk's tokens; 0 for tokens from `end` on."""
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * STRIDE + columns[None, :])
    valid = (start + rows < end)[:, None]
    gates = masked_load(at, valid, (columns < spec.K)[None, :], not spec.FULL_CHUNKS, spec.K % COLUMNS != 0)
    return powers_of_two(gates)


@triton.jit
def decayed(tile, decay):
    """Returns a tile times its decay, rounded to its dtype: an operand of products."""
    return (tile.to(tl.float32) * decay).to(tile.dtype)


@triton.jit
def store_factors(base, before, between, after, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Stores what `tile.state_factors` reads."""
    columns = column + tl.arange(0, COLUMNS)
    valid = columns < spec.K
    tl.store(base + columns, before, mask=valid)
    tl.store(base + spec.K + columns, between, mask=valid)
    tl.store(base + 2 * spec.K + columns, after, mask=valid)


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
    starts,
    ends,
    u,
    w,
    inverse,
    scores,
    decayed_query,
    decayed_key,
    factors,
    exponents,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Computes all of one head's chunk if its gates are weak, and the largest exponent, which tells whether they are.

    T is 1 for a decay that is the same for all tokens. See `forward.wy_channel_gates`.
    """
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
    d_base = chunk_base(decay, row // per.DECAY, start * (T > 1), head, T, spec.H, spec.K)
    D_STRIDE: tl.constexpr = (T > 1) * spec.H * spec.K
    w_to = chunk_base(w, row, start, head, spec.T, spec.H, spec.K)
    q_to = chunk_base(decayed_query, row, start, head, spec.T, spec.H, spec.K)
    k_to = chunk_base(decayed_key, row, start, head, spec.T, spec.H, spec.K)
    f_base = factors_base(factors, row, head, chunk, spec)
    read = tl.zeros([C, C], tl.float32)
    seen = tl.zeros([C, C], tl.float32)
    largest = 0.0
    for k_start in tl.range(0, spec.K, BLOCK_K):
        gates = load_log_gates(d_base, start, end, k_start, D_STRIDE, BLOCK_K, spec)
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        middle = tl.sum(tl.where((rows < C // 2)[:, None], gates, 0.0), 0)
        after = tl.sum(tl.where((rows >= C // 2)[:, None], gates, 0.0), 0)
        store_factors(f_base, middle, tl.zeros_like(middle), after, k_start, BLOCK_K, spec)
        relative = sums_from_middle(gates, k.dtype, spec)
        largest = tl.maximum(largest, tl.max(tl.abs(relative)))
        # Operands of the products are also stored for other kernels: the same values, rounded once.
        right = decayed(k, tl.exp2(-relative))
        store_rows(k_to, right, start, end, k_start, spec.H, spec.K, spec)
        decay_since = tl.exp2(relative)
        left = decayed(q, decay_since)
        store_rows(q_to, left, start, end, k_start, spec.H, spec.K, spec)
        # Not masked yet: the products above the diagonal are finite.
        read = add_dot(read, left, tl.trans(right), spec)
        if k_start + BLOCK_K >= spec.K:
            # Stored before the products of keys, which then have the registers.
            store_scores(scores, read, row, head, chunk, spec)
        left = decayed(k, decay_since)
        store_rows(w_to, left, start, end, k_start, spec.H, spec.K, spec)
        seen = add_dot(seen, left, tl.trans(right), spec)
    tl.store(exponents + (tl.cast(row, tl.int64) * spec.H + head) * spec.CHUNKS + chunk, largest)
    arrays = (beta, value, u, w, inverse)
    solve_chunk(seen, arrays, (row, head, chunk, start, end), spec, per, BLOCK_K, BLOCK_V, KEEP)
