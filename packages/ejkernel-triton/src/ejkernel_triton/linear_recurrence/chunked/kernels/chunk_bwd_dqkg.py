"""Computes gradients of queries, keys and gates of all chunks in parallel; the formulas are in `chunk_bwd_dv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_tokens
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    constant_gate,
    cut_weights,
    decay_until_end,
    diagonal,
    from_middle,
    gates_base,
    head_gates,
    last_head_gate,
    load_dt,
    load_gates,
    load_last_gates,
    load_once,
    load_rows,
    load_state,
    pair_weights,
    pairs_of,
    state_base,
    store_rows,
)

NO_GRADIENT_BELOW = tl.constexpr(-57.5)
"""log2 gates below this have no gradient: `chunk_local_cumsum_kernel` raises them all to -58, a constant."""


@triton.jit
def reload_tiles(tile_bases, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Loads queries, keys and cumulative gates of a chunk once more, inside the loop that uses them.

    The opaque offset keeps the compiler from hoisting the loads out of the loop, where their tiles would spill.
    """
    q_base, k_base, start, end = tile_bases
    opaque_zero = level >> 5  # 0, which the compiler cannot fold
    q = load_rows(q_base + opaque_zero, start, end, column, spec.HQ, spec.K, COLUMNS, spec)
    k = load_rows(k_base + opaque_zero, start, end, column, spec.HK, spec.K, COLUMNS, spec)
    return q.to(tl.float32), k.to(tl.float32), load_gates(base + opaque_zero, column, COLUMNS, spec)


@triton.jit
def channel_gradients(
    dq,
    dk,
    dpairs,
    query,
    key,
    gates,
    base,
    column,
    tile_bases,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns dq plus sum_j w_ijk pairs_ij k_jk, and dk plus sum_i w_ijk pairs_ij q_ik.

    These are the transposed products of `intra_chunk_scores`.

    Args:
        dq: [CHUNK, COLUMNS] float32.
        dk: [CHUNK, COLUMNS] float32.
        dpairs: [CHUNK, CHUNK] float32, gradients of the scores by (i, j), 0 for j > i.
        query: [CHUNK, COLUMNS].
        key: [CHUNK, COLUMNS].
        gates: [CHUNK, COLUMNS] cumulative gates.
        base: Address of the gates.
        column: First key channel.
        tile_bases: Pointers to the chunk's queries and keys, its first token and its sequence's end.
    """
    # The caller loaded the tiles for the first branch; the second one loads them again (see `reload_tiles`).
    relative, weak = from_middle(gates, base, column, COLUMNS, spec)
    q, k = query.to(tl.float32), key.to(tl.float32)
    if weak:
        # One product each: the decay of the contracted token multiplies the operand, that of the row the result.
        dscores = dpairs.to(query.dtype)
        decay_since, decay_until = tl.exp2(relative), tl.exp2(-relative)
        dq += decay_since * dot(dscores, (k * decay_until).to(key.dtype), spec)
        dk += decay_until * dot(tl.trans(dscores), (q * decay_since).to(query.dtype), spec)
    else:
        # A token with itself has no decay, and is in no block of `cut_weights`.
        diagonal_dscores = tl.sum(tl.where(diagonal(spec), dpairs, 0.0), 1)[:, None]
        dq += diagonal_dscores * k
        dk += diagonal_dscores * q
        LEVELS: tl.constexpr = spec.LEVELS
        for level in tl.range(0, LEVELS, num_stages=1):
            # Reloaded from L2 at each level: three float32 tiles that live through the loop spill registers.
            q, k, g = reload_tiles(tile_bases, base, column, level, COLUMNS, spec)
            weights = cut_weights(g, base, column, level, COLUMNS, spec)
            dscores = tl.where(pairs_of(level, spec), dpairs, 0.0).to(query.dtype)
            dq += weights * dot(dscores, (k * weights).to(key.dtype), spec)
            dk += weights * dot(tl.trans(dscores), (q * weights).to(query.dtype), spec)
    return dq, dk


@triton.jit
def through_states(
    values,
    k_start,
    GATES: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns dS v_j of a chunk's tokens, [CHUNK, BLOCK_K], and <dS, S_0> of each key channel if GATES.

    Args:
        values: Pointers to values, S_0 and dS, the chunk's first token and its sequence's end.
        k_start: First key channel.
    """
    v_base, s_base, d_base, start, end = values
    C: tl.constexpr = spec.CHUNK
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    state_product = tl.zeros([BLOCK_K], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_rows(v_base, start, end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
        ds = load_state(d_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        dk = add_dot(dk, v.to(ds.dtype), tl.trans(ds), spec)
        if GATES:
            s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            # S_0 decays through the whole chunk, which contributes to the gradient of the last token's gate.
            state_product += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return dk, state_product


@triton.jit
def chunk_bwd_dqkg_kernel(
    query,
    key,
    value,
    gates,
    dt,
    cotangent,
    states,
    dstates,
    starts,
    ends,
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
    ONCE: tl.constexpr,
):
    """Computes the gradients of one chunk's queries, keys and gates; see `backward.key_gradients`."""
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    C: tl.constexpr = spec.CHUNK
    GROUPS: tl.constexpr = spec.H // SHARED
    # Gradients of queries or keys with H heads are stored head by head; those of shared heads after the loop.
    Q_HEADS: tl.constexpr = spec.H if spec.HQ == spec.H else GROUPS
    K_HEADS: tl.constexpr = spec.H if spec.HK == spec.H else GROUPS
    program = tl.program_id(0)
    tile = program % K_TILES
    k_start = tile * BLOCK_K
    program = program // K_TILES
    group = program % GROUPS
    program = program // GROUPS
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, C)
    dq_sum = tl.zeros([C, BLOCK_K], tl.float32)
    dk_sum = tl.zeros([C, BLOCK_K], tl.float32)
    for member in tl.range(0, SHARED):
        head = group * SHARED + member
        v_head = head // (spec.H // VALUE_HEADS)
        v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        s_base = state_base(states, row, head, chunk, spec)
        d_base = state_base(dstates, row, head, chunk, spec)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        constant = constant_gate(gates, row, head, spec, per)
        # Queries first: the gradients of scores, and the product with S_0, which share the tiles of do.
        dpairs = tl.zeros([C, C], tl.float32)
        dq = tl.zeros([C, BLOCK_K], tl.float32)
        for v_start in tl.range(0, spec.V, BLOCK_V):
            do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
            v = load_rows(v_base, start, end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
            s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            dpairs = add_dot(dpairs, do, tl.trans(v), spec)
            dq = add_dot(dq, do.to(s.dtype), tl.trans(s), spec)
        values = (v_base, s_base, d_base, start, end)
        q_head = head // (spec.H // spec.HQ)
        k_head = head // (spec.H // spec.HK)
        q_base = chunk_base(query, row // per.QUERY, start, q_head, spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, k_head, spec.T, spec.HK, spec.K)
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        dq *= spec.SCALE
        dpairs *= spec.SCALE
        if spec.DT:
            if ONCE:
                dt_base = chunk_base(dt, row // per.DT, start, head, spec.T, spec.H, 1)
                factors = load_once(dt_base + rows * spec.H, start + rows < end, True)
            else:
                factors = load_dt(dt, row // per.DT, start, end, head, spec)
            # dt belongs to the written token, which is the column.
            dpairs *= factors[None, :]
        if spec.WIDTH > 1:
            # With gates per key channel both gradients stay in registers, since each level adds to both.
            dk, state_product = through_states(values, k_start, GATES, VALUE_HEADS, BLOCK_K, BLOCK_V, spec)
            if spec.DT:
                dk *= factors[:, None]
            g = load_gates(g_base, k_start, BLOCK_K, spec)
            last = load_last_gates(g_base, k_start, BLOCK_K, spec)
            dq *= tl.exp2(g)
            dk *= tl.exp2(last[None, :] - g)
            state_product = state_product * tl.exp2(last) + tl.sum(dk * k.to(tl.float32), 0)
            # Masked before `channel_gradients`, whose factors above the diagonal are large but finite: their product is
            # 0.
            dpairs = tl.where(rows[:, None] >= rows[None, :], dpairs, 0.0)
            dq, dk = channel_gradients(
                dq, dk, dpairs, q, k, g, g_base, k_start, (q_base, k_base, start, end), BLOCK_K, spec
            )
            if GATES:
                # G_t increases what query t reads, and decreases what later queries read of key t: q dq - k dk. The
                # term of a token with itself cancels.
                dgate = dq * q.to(tl.float32) - dk * k.to(tl.float32)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = (tl.sum(dgate, 0) + state_product)[None, :] - (tl.cumsum(dgate, 0) - dgate)
                columns = k_start + tl.arange(0, BLOCK_K)
                valid = (rows > 0)[:, None] & (columns < spec.K)[None, :]
                # The gate is the difference of consecutive cumulative gates; the first one is the sum itself.
                previous = tl.load(g_base + ((rows - 1)[:, None] * spec.K + columns[None, :]), mask=valid, other=0.0)
                dgate = tl.where(g - previous < NO_GRADIENT_BELOW, 0.0, dgate)
                at = chunk_base(dgates, row, start, head, spec.T, spec.H, spec.K)
                store_rows(at, dgate, start, end, k_start, spec.H, spec.K, spec)
        else:
            if spec.WIDTH == 1:
                g = load_once(g_base + rows, rows >= 0, False) if ONCE else head_gates(g_base, constant, 0, C, spec)
                dq *= tl.exp2(g)[:, None]
                # Also masks: the weights are 0 above the diagonal.
                dpairs *= pair_weights(g)
            else:
                dpairs = tl.where(rows[:, None] >= rows[None, :], dpairs, 0.0)
            dscores = dpairs.to(q.dtype)
            dq = add_dot(dq, dscores, k, spec)
            # Register pressure: the gradient of queries is stored before that of keys is computed.
            if GATES:
                dgate = tl.sum(dq * q.to(tl.float32), 1)
            if spec.HQ == spec.H:
                at = chunk_base(dquery, row, start, head, spec.T, Q_HEADS, spec.K)
                store_rows(at, dq, start, end, k_start, Q_HEADS, spec.K, spec)
            else:
                dq_sum += dq
            # Values are loaded a second time. One loop for both gradients takes 245 registers, two loops 168
            # (docs/lab/linear_recurrence_gpu.md).
            dk, state_product = through_states(values, k_start, GATES, VALUE_HEADS, BLOCK_K, BLOCK_V, spec)
            if spec.DT:
                dk *= factors[:, None]
            if spec.WIDTH == 1:
                last = last_head_gate(g_base, constant, end - start, spec)
                dk *= decay_until_end(last, g, spec)[:, None]
                state_product *= tl.exp2(last)
            if GATES:
                # Before the chunk's own terms are added to dk: the last gate scales only what passes through dS.
                last_dgate = tl.sum(state_product, 0) + tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0)
            dk = add_dot(dk, tl.trans(dscores), q, spec)
            if GATES:
                dgate -= tl.sum(dk * k.to(tl.float32), 1)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = tl.sum(dgate, 0) + last_dgate - (tl.cumsum(dgate, 0) - dgate)
                if spec.CONSTANT:
                    dgate = tl.where(constant < NO_GRADIENT_BELOW, 0.0, dgate)
                elif spec.WIDTH == 1:
                    previous = tl.load(g_base + rows - 1, mask=rows > 0, other=0.0)
                    dgate = tl.where(g - previous < NO_GRADIENT_BELOW, 0.0, dgate)
                store_tokens(dgates, dgate, row, start, end, tile, K_TILES, head, spec)
        if spec.WIDTH > 1:
            if spec.HQ == spec.H:
                at = chunk_base(dquery, row, start, head, spec.T, Q_HEADS, spec.K)
                store_rows(at, dq, start, end, k_start, Q_HEADS, spec.K, spec)
            else:
                dq_sum += dq
        if spec.HK == spec.H:
            at = chunk_base(dkey, row, start, head, spec.T, K_HEADS, spec.K)
            store_rows(at, dk, start, end, k_start, K_HEADS, spec.K, spec)
        else:
            dk_sum += dk
    if spec.HQ != spec.H:
        at = chunk_base(dquery, row, start, group, spec.T, Q_HEADS, spec.K)
        store_rows(at, dq_sum, start, end, k_start, Q_HEADS, spec.K, spec)
    if spec.HK != spec.H:
        at = chunk_base(dkey, row, start, group, spec.T, K_HEADS, spec.K)
        store_rows(at, dk_sum, start, end, k_start, K_HEADS, spec.K, spec)
