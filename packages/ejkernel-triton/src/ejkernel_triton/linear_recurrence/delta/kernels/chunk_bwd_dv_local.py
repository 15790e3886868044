"""Computes the contribution of later tokens of a chunk to the gradient of a token's write."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    gates_address,
    load_token_rows,
    pairwise_decay,
    score_pointers,
    store_token_rows,
)


@triton.jit
def chunk_bwd_dv_local_kernel(
    query,
    key,
    gates,
    scores,
    cotangent,
    chunk_starts,
    sequence_ends,
    intra_chunk_dv,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes scale A^T do of one head's chunk: the gradient of each token's write from later reads in the chunk."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    rows = tl.arange(0, CHUNK)
    query_base = chunk_address(
        query, row // per.QUERY, first_token, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K
    )
    key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    gates_base = gates_address(gates, row, head, chunk, spec, per)
    if spec.GATE_CHANNELS > 1:
        # From `chunk_fwd_intra_kernel`, or the forward pass: decayed, 0 above the diagonal, and not scaled.
        pairs = tl.load(score_pointers(scores, row, head, chunk, spec)).to(tl.float32)
    else:
        pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        for k_start in tl.range(0, spec.K, BLOCK_K):
            q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
            k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
            pairs = add_dot(pairs, q, tl.trans(k), spec)
    if spec.GATE_CHANNELS == 1:
        pairs *= pairwise_decay(tl.load(gates_base + rows))
    if spec.GATE_CHANNELS == 0:
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    # A^T is the left operand for all tiles of values.
    pairs *= spec.OUTPUT_SCALE
    do_base = chunk_address(cotangent, row // per.COTANGENT, first_token, head, spec.T, spec.H, spec.V)
    output_base = chunk_address(intra_chunk_dv, row, first_token, head, spec.T, spec.H, spec.V)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        do = load_token_rows(do_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        store_token_rows(
            output_base,
            dot(tl.trans(pairs.to(do.dtype)), do, spec),
            first_token,
            sequence_end,
            v_start,
            spec.H,
            spec.V,
            spec,
        )
