"""Computes outputs of all chunks in parallel, each from the state before it and its own tokens.

o_i = scale (q_i exp2(G_i) S_0 + sum_{j <= i} (q_i exp2(G_i - G_j) k_j) dt_j v_j) + skip v_i

    key channels    |  tile 0  |  tile 1  |          a program: one head, one chunk, BLOCK_V value channels
    q, S_0       -> acc += q S_0                     in the loop over key channels
    q, k         -> pairs += q k^T
    gates        -> acc *= exp2(G_i), pairs *= exp2(G_i - G_j)
    pairs, v     -> acc += pairs v                   after it, for the diagonal block of tokens
    q, k', v'    -> acc += pairs' v'                 for every earlier block of the chunk, where it has several

With gates per key channel the decay differs along the contracted axis: q is multiplied by exp2(G_i) in the loop, and an
earlier kernel computes the pairs, once for all tiles of values.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    constant_gate,
    gates_base,
    head_gates,
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
def chunk_fwd_o_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    states,
    starts,
    ends,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Computes outputs of BLOCK_T tokens of one head's chunk and BLOCK_V value channels; see
    `forward.chunk_outputs`.
    """
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = spec.CHUNK // BLOCK_T
    program = tl.program_id(0)
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    # Blocks of a chunk and its heads have consecutive programs, which share their inputs in L2.
    block = program % BLOCKS
    program = program // BLOCKS
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    first, end = chunk_span(starts, ends, row, chunk, spec, per)
    start = first + block * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    v_head = head // (spec.H // VALUE_HEADS)
    v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
    s_base = state_base(states, row, head, chunk, spec)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    pairs = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    # The product with the state, and the products of the diagonal block: both read q, so they share the loop.
    for k_start in tl.range(0, spec.K, BLOCK_K):
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec, BLOCK_T)
        s = load_state(s_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        if spec.DECAYED:
            acc = add_dot(acc, q.to(s.dtype), s, spec)
        elif spec.WIDTH > 1:
            acc = add_dot(
                acc, (q.to(tl.float32) * tl.exp2(load_gates(g_base, k_start, BLOCK_K, spec))).to(s.dtype), s, spec
            )
        else:
            k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec, BLOCK_T)
            pairs = add_dot(pairs, q, tl.trans(k), spec)
            acc = add_dot(acc, q.to(s.dtype), s, spec)
    g = 0.0
    if spec.WIDTH > 1:
        # Scores are 0 above the diagonal.
        pairs = tl.load(scores_at(scores, row, head, chunk, spec))
    if spec.WIDTH == 1:
        # A gate per head is a factor of rows: once on the accumulator, instead of on every tile of q.
        constant = constant_gate(gates, row, head, spec, per)
        g = head_gates(g_base, constant, block * BLOCK_T, BLOCK_T, spec)
        acc *= tl.exp2(g)[:, None]
        # Also masks: the weights are 0 above the diagonal.
        pairs *= pair_weights(g)
    if spec.WIDTH == 0:
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    if spec.DT:
        pairs = pairs.to(tl.float32) * load_dt(dt, row // per.DT, start, end, head, spec, BLOCK_T)[None, :]
    # Tokens past the end have keys and values of 0, so they add nothing; their outputs are not stored.
    v = load_rows(v_base, start, end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec, BLOCK_T)
    acc = add_dot(acc, pairs.to(v.dtype), v, spec)
    if BLOCKS > 1:
        # Blocks of 64 tokens in chunks of 128 move half as many states, 0.356 ms instead of 0.382
        # (docs/lab/linear_recurrence_gpu.md), while a tile has the rows of one warpgroup.
        for earlier_block in tl.range(0, block):
            # All pairs count here. q is reloaded from L1 or L2: kept through the loop it would take registers.
            distance = (block - earlier_block) * BLOCK_T
            k_earlier = k_base - distance * (spec.HK * spec.K)
            pairs = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for k_start in tl.range(0, spec.K, BLOCK_K):
                q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec, BLOCK_T)
                k = load_rows(k_earlier, start - distance, end, k_start, spec.HK, spec.K, BLOCK_K, spec, BLOCK_T)
                pairs = add_dot(pairs, q, tl.trans(k), spec)
            if spec.WIDTH == 1:
                # No mask before exp2: sums of earlier tokens are larger, so every exponent is at most 0.
                earlier = head_gates(g_base, constant, earlier_block * BLOCK_T, BLOCK_T, spec)
                pairs *= tl.exp2(g[:, None] - earlier[None, :])
            if spec.DT:
                pairs *= load_dt(dt, row // per.DT, start - distance, end, head, spec, BLOCK_T)[None, :]
            v_earlier = load_rows(
                v_base - distance * (VALUE_HEADS * spec.V),
                start - distance,
                end,
                v_start,
                VALUE_HEADS,
                spec.V,
                BLOCK_V,
                spec,
                BLOCK_T,
            )
            acc = add_dot(acc, pairs.to(v_earlier.dtype), v_earlier, spec)
    # The output is scaled; the skip is not.
    acc *= spec.SCALE
    if spec.SKIP:
        acc += v.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
    store_rows(
        chunk_base(output, row, start, head, spec.T, spec.H, spec.V), acc, start, end, v_start, spec.H, spec.V, spec
    )
