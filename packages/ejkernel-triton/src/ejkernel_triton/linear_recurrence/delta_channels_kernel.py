# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""All that the delta rule with gates of channels makes inside of a chunk, in one kernel that reads its gates once.

Cumulative gates take as many bytes as queries and keys together. So no array of them goes to other kernels: what reads
the state or is written to it leaves this one with its decay.

    in a loop over key channels
        decay      -> G, cumulative gates
        q, k, G    -> q exp2(G), k exp2(G_T - G)       for the outputs, and for state passing
                   -> exp2(G_T)                        the decay of the state, as powers of two
                   -> y = k exp2(G)                    what W is made of, kept in W's place
                   -> pairs of queries and keys, pairs of keys and keys
    pairs          -> scores, and L -> (I + L)^-1      see `delta_kernel`
    V              -> U,  y -> W
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.delta_kernel import unit_inverse
from ejkernel_triton.linear_recurrence.tile import (
    causal,
    chunk_base,
    chunk_span,
    cut_weights,
    diagonal,
    load_dt,
    load_gates,
    load_rows,
    masked_load,
    pairs_of,
    powers_of_two,
    scores_at,
    store_rows,
)


@triton.jit
def sums_from_middle(gates, dtype: tl.constexpr, spec: tl.constexpr):
    """Sums of gates from the chunk's middle to each token, with a minus before it: [CHUNK, COLUMNS] float32.

    They are a product with a matrix of 0, 1 and -1. A scan along tokens takes several times as many instructions.
    """
    token, summed = tl.arange(0, spec.CHUNK)[:, None], tl.arange(0, spec.CHUNK)[None, :]
    later = summed >= spec.CHUNK // 2
    signs = ((summed <= token) & later).to(tl.float32) - ((summed > token) & (summed < spec.CHUNK // 2)).to(tl.float32)
    if dtype == tl.float32:
        return dot(signs, gates, spec)
    else:
        # 16 bits of each gate: more than its factors of 16 bits keep, and every sum has the same rounded gates.
        signs = signs.to(tl.bfloat16)
        high = gates.to(tl.bfloat16)
        return add_dot(dot(signs, high, spec), signs, (gates - high.to(tl.float32)).to(tl.bfloat16), spec)


@triton.jit
def load_log_gates(base, start, end, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """[CHUNK, COLUMNS] gates of a chunk's tokens as powers of two; 0 for tokens from `end` on."""
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * STRIDE + columns[None, :])
    valid = (start + rows < end)[:, None]
    gates = masked_load(at, valid, (columns < spec.K)[None, :], not spec.FULL_CHUNKS, spec.K % COLUMNS != 0)
    return powers_of_two(gates)


@triton.jit
def store_decayed(query, key, since_start, until_end, bases, start, end, column, spec: tl.constexpr):
    """Writes queries and keys with the decay since the chunk's start, and keys with the decay until its end."""
    q_to, k_to, y_to = bases
    q, k = query.to(tl.float32), key.to(tl.float32)
    store_rows(q_to, q * since_start, start, end, column, spec.H, spec.K, spec)
    store_rows(k_to, k * until_end, start, end, column, spec.H, spec.K, spec)
    store_rows(y_to, k * since_start, start, end, column, spec.H, spec.K, spec)


@triton.jit
def halved_pairs(read, seen, query, key, base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Adds the pairs of queries and keys, and of keys and keys, by halvings; see `tile.channel_scores`."""
    q, k = query.to(tl.float32), key.to(tl.float32)
    read += tl.where(diagonal(spec), tl.sum(q * k, 1)[:, None], 0.0)
    LEVELS: tl.constexpr = spec.LEVELS
    for level in tl.range(0, LEVELS, num_stages=1):
        # level >> 5 is an opaque 0: gates are read from the cache in each halving instead of held through the loop.
        gates = load_gates(base + (level >> 5), column, COLUMNS, spec)
        weights = cut_weights(gates, base, column, level, COLUMNS, spec)
        earlier = tl.trans((key.to(tl.float32) * weights).to(key.dtype))
        own = pairs_of(level, spec)
        products = dot((query.to(tl.float32) * weights).to(query.dtype), earlier, spec)
        read += tl.where(own, products, 0.0)
        products = dot((key.to(tl.float32) * weights).to(key.dtype), earlier, spec)
        seen += tl.where(own, products, 0.0)
    return read, seen


@triton.jit
def channel_corrections_kernel(
    query,
    key,
    value,
    decay,
    beta,
    bounds,
    first_chunks,
    chunk_sequences,
    written,
    correction,
    inverse,
    scores,
    decayed_query,
    decayed_key,
    totals,
    cumulative,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
):
    """U, W, scores, decayed queries and keys of one head's chunk, (I + L)^-1 if KEEP; see `delta.channel_corrections`.

    T is 1 for a decay that is the same for all tokens. `cumulative` is written only where gates are too strong for one
    product of a chunk's pairs, and read by this program alone.
    """
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(bounds, first_chunks, chunk_sequences, row, chunk, spec, per)
    rows = tl.arange(0, C)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    v_base = chunk_base(value, row // per.VALUE, start, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V)
    d_base = chunk_base(decay, row // per.DECAY, start * (T > 1), head, T, spec.H, spec.K)
    D_STRIDE: tl.constexpr = spec.H * spec.K if T > 1 else 0
    chunk_of_head = (tl.cast(row, tl.int64) * spec.H + head) * spec.CHUNKS + chunk
    g_base = cumulative + chunk_of_head * (C * spec.K)
    u_to = chunk_base(written, row, start, head, spec.T, spec.H, spec.V)
    w_to = chunk_base(correction, row, start, head, spec.T, spec.H, spec.K)
    bases = (
        chunk_base(decayed_query, row, start, head, spec.T, spec.H, spec.K),
        chunk_base(decayed_key, row, start, head, spec.T, spec.H, spec.K),
        w_to,
    )
    read = tl.zeros([C, C], tl.float32)
    seen = tl.zeros([C, C], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K):
        columns = k_start + tl.arange(0, BLOCK_K)
        gates = load_log_gates(d_base, start, end, k_start, D_STRIDE, BLOCK_K, spec)
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        relative = sums_from_middle(gates, k.dtype, spec)
        middle, total = tl.sum(tl.where((rows < C // 2)[:, None], gates, 0.0), 0), tl.sum(gates, 0)
        tl.store(totals + chunk_of_head * spec.K + columns, total, mask=columns < spec.K)
        # As in `tile.from_middle`, with the branch that it leads to in `tile.channel_scores`.
        if tl.max(tl.abs(relative)) < spec.MAX_EXPONENT:
            since, until = tl.exp2(relative), tl.exp2(-relative)
            left, right = (q.to(tl.float32) * since).to(q.dtype), tl.trans((k.to(tl.float32) * until).to(k.dtype))
            # Not masked yet: what is above the diagonal is finite, and dropped behind the loop.
            read = add_dot(read, left, right, spec)
            seen = add_dot(seen, (k.to(tl.float32) * since).to(k.dtype), right, spec)
            # Two exponentials an element and not four: the unit that makes them is slower than memory.
            since_start, until_end = since * tl.exp2(middle)[None, :], until * tl.exp2(total - middle)[None, :]
            store_decayed(q, k, since_start, until_end, bases, start, end, k_start, spec)
        else:
            # Where cuts lie differs by level, and registers have no index: halvings read the gates from memory.
            tl.store(g_base + (rows[:, None] * spec.K + columns[None, :]), relative, mask=(columns < spec.K)[None, :])
            since_start, until_end = tl.exp2(relative + middle[None, :]), tl.exp2((total - middle)[None, :] - relative)
            store_decayed(q, k, since_start, until_end, bases, start, end, k_start, spec)
            tl.debug_barrier()  # other threads wrote what a thread reads
            read, seen = halved_pairs(read, seen, q, k, g_base, k_start, BLOCK_K, spec)
    tl.store(scores_at(scores, row, head, chunk, spec), tl.where(causal(spec), read, 0.0).to(scores.dtype.element_ty))
    # 0 behind the end: rows of L are 0 there, and the inverse has rows of I.
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    lower = tl.where(rows[:, None] > rows[None, :], seen * betas[:, None], 0.0)
    unit_inverted = unit_inverse(lower, spec)
    if KEEP:
        tl.store(scores_at(inverse, row, head, chunk, spec), unit_inverted.to(inverse.dtype.element_ty))
    ut = (unit_inverted * betas[None, :]).to(value.dtype.element_ty)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_rows(v_base, start, end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        store_rows(u_to, dot(ut, v, spec), start, end, v_start, spec.H, spec.V, spec)
    tl.debug_barrier()  # W's place has y, which other threads wrote
    for k_start in tl.range(0, spec.K, BLOCK_K):
        y = load_rows(w_to, start, end, k_start, spec.H, spec.K, BLOCK_K, spec)
        made = dot(ut, y, spec)
        tl.debug_barrier()  # all threads have read y before W takes its place
        store_rows(w_to, made, start, end, k_start, spec.H, spec.K, spec)
