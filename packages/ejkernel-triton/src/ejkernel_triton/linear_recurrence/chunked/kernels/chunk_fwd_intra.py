"""Computes the scores of the pairs of tokens inside a chunk, with gates per key channel."""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import (
    add_channel_gated_scores,
    chunk_address,
    chunk_start_and_sequence_end,
    gates_address,
    load_channel_gate_cumsum,
    load_token_rows,
    score_pointers,
)


@triton.jit
def chunk_fwd_intra_kernel(
    query,
    key,
    gates,
    chunk_starts,
    sequence_ends,
    scores,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes sum_k q_ik exp2(G_ik - G_jk) k_jk of one head's chunk for j <= i, with gates per key channel; else 0."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    query_base = chunk_address(
        query, row // per.QUERY, first_token, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K
    )
    key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    gates_base = gates_address(gates, row, head, chunk, spec, per)
    # This is a separate kernel: in `chunk_fwd_o_kernel` the pairs take 255 registers with eight warps and spill with
    # four, and every tile of values would recompute them (docs/lab/linear_recurrence_gpu.md).
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K):
        q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        gate_cumsum = load_channel_gate_cumsum(gates_base, k_start, BLOCK_K, spec)
        acc = add_channel_gated_scores(acc, q, k, gate_cumsum, gates_base, k_start, BLOCK_K, spec)
    tl.store(score_pointers(scores, row, head, chunk, spec), acc.to(scores.dtype.element_ty))
