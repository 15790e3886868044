"""Computes the contribution of later tokens of a chunk to the gradient of a token's write."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    gates_base,
    load_rows,
    pair_weights,
    scores_at,
    store_rows,
)


@triton.jit
def chunk_bwd_dv_local_kernel(
    query,
    key,
    gates,
    scores,
    cotangent,
    starts,
    ends,
    intra_chunk,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes scale A^T do of one head's chunk: the gradient of each token's write from later reads in the chunk."""
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
    g_base = gates_base(gates, row, head, chunk, spec, per)
    if spec.WIDTH > 1:
        # From `chunk_fwd_intra_kernel`, or the forward pass: decayed, 0 above the diagonal, and not scaled.
        pairs = tl.load(scores_at(scores, row, head, chunk, spec)).to(tl.float32)
    else:
        pairs = tl.zeros([C, C], tl.float32)
        for k_start in tl.range(0, spec.K, BLOCK_K):
            q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
            k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
            pairs = add_dot(pairs, q, tl.trans(k), spec)
    if spec.WIDTH == 1:
        pairs *= pair_weights(tl.load(g_base + rows))
    if spec.WIDTH == 0:
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    # A^T is the left operand for all tiles of values.
    pairs *= spec.SCALE
    o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
    to = chunk_base(intra_chunk, row, start, head, spec.T, spec.H, spec.V)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        store_rows(to, dot(tl.trans(pairs.to(do.dtype)), do, spec), start, end, v_start, spec.H, spec.V, spec)
