"""Computes the scores of the pairs of tokens inside a chunk, with gates per key channel."""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import (
    channel_scores,
    chunk_base,
    chunk_span,
    gates_base,
    load_gates,
    load_rows,
    scores_at,
)


@triton.jit
def chunk_fwd_intra_kernel(
    query,
    key,
    gates,
    starts,
    ends,
    scores,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes sum_k q_ik exp2(G_ik - G_jk) k_jk of one head's chunk for j <= i, with gates per key channel; else 0."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    q_base = chunk_base(query, row // per.QUERY, start, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    # This is a separate kernel: in `chunk_fwd_o_kernel` the pairs take 255 registers with eight warps and spill with
    # four, and every tile of values would recompute them (docs/lab/linear_recurrence_gpu.md).
    acc = tl.zeros([C, C], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K):
        q = load_rows(q_base, start, end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        g = load_gates(g_base, k_start, BLOCK_K, spec)
        acc = channel_scores(acc, q, k, g, g_base, k_start, BLOCK_K, spec)
    tl.store(scores_at(scores, row, head, chunk, spec), acc.to(scores.dtype.element_ty))
