"""The gradients of the delta rule, whose tokens write x = (I + L)^-1 diag(beta) (V - (exp2(G) K) S_0) = U - W S_0.

A token reads the state twice: with its query, with the output's cotangent, and with its key, whose cotangent is -dv_i.
So keys get the gradients of a query and those of a key. With A the scores, S the state before a chunk and dS the
gradient of the state after it:

    chunk_bwd_dv_local       all chunks in parallel             do -> A^T do
    chunk_bwd_dhu            from the last chunk to the first   dS, q, do, W, k, A^T do -> dx, dS
                 dx = A^T do + (k exp2(G_T - G)) dS
                 dS = exp2(G_T) dS + scale (q exp2(G))^T do - W^T dx
                 with gates per key channel, the same with decayed operands (see `wy_channel_gates`)
    wy_bwd                   all chunks in parallel             dx -> dy = (I + L)^-T dx, dv = beta dy
    chunk_bwd_dqkwg          all chunks, BLOCK_K key channels   dy, do, x -> dq, dk, dG, dbeta
                 r_i    = -(exp2(G_i) S dy_i + sum_{j < i} w_ij <dy_i, x_j> k_j)     k_i as a query, without beta
                 dk_i   = beta_i r_i + (its gradient as a key of both reads)
                 dbeta  = <dy, v> + <r, k>
                 dG_t   = q_t dq_t + k_t beta_t r_t - k_t (its gradient as a key)

No gradient is divided by beta, which may be 0. There are no atomics: programs that share a gradient store partial sums,
which are added in a fixed order, so results are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    gates_address,
    load_log2_chunk_decay,
    load_sequence_bounds,
    load_state,
    load_token_rows,
    sequence_index_of_scan,
    state_address,
    store_state,
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.segments.kernels.chunks_until_decayed import load_chunks_until_decayed


@triton.jit
def chunk_bwd_dhu_kernel(
    query,
    key,
    gates,
    w,
    cotangent,
    intra_chunk_dv,
    final_state_gradient,
    padded_cu_seqlens,
    chunk_offsets,
    sequences_by_length,
    chunks_until_decayed,
    dstates,
    initial_state_gradient,
    dv_new,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_FINAL_STATE_GRADIENTS: tl.constexpr,
    STORE_CHUNK_STATES: tl.constexpr,
    FIRST_SCANNED_SEGMENT: tl.constexpr,
    NUM_TILES_OF_CHUNKS_UNTIL_DECAYED: tl.constexpr,
):
    """Passes BLOCK_V columns of the gradient of one head's state from the last chunk of a sequence to the first.

    A program holds all key channels, padded to BLOCK_K, since dx is a sum over them.
    """
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.NUM_SEQUENCES
    sequence = sequence_index_of_scan(sequences_by_length, row, program % spec.NUM_SEQUENCES, spec, per)
    first_chunk, end_chunk, sequence_start, sequence_end = load_sequence_bounds(
        padded_cu_seqlens, chunk_offsets, row, sequence + FIRST_SCANNED_SEGMENT, spec, per
    )
    if NUM_TILES_OF_CHUNKS_UNTIL_DECAYED > 0:
        # The gradient at the segment's start: chunks whose contribution decays to nothing on the way there are skipped.
        NUM_SEGMENTS: tl.constexpr = (spec.NUM_CHUNKS + spec.CHUNKS_PER_SEGMENT - 1) // spec.CHUNKS_PER_SEGMENT
        end_chunk = tl.minimum(
            end_chunk,
            first_chunk
            + load_chunks_until_decayed(
                chunks_until_decayed,
                row,
                sequence + FIRST_SCANNED_SEGMENT,
                head,
                NUM_SEGMENTS,
                NUM_TILES_OF_CHUNKS_UNTIL_DECAYED,
                spec,
            ),
        )
    rows = tl.arange(0, CHUNK)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_FINAL_STATE_GRADIENTS:
        final_row = tl.cast(row // per.FINAL_STATE_GRADIENT, tl.int64) * spec.NUM_SEQUENCES + sequence
        state_offset = (final_row * spec.H + head) * (spec.K * spec.V)
        # The scan starts with the cotangent of the final state.
        acc = load_state(final_state_gradient + state_offset, 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    q_head = head // (spec.H // spec.HQ)
    k_head = head // (spec.H // spec.HK)
    next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, end_chunk - 1, 0, BLOCK_K, spec, per)
    for step in tl.range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - step
        chunk_first_token = sequence_start + (chunk - first_chunk) * CHUNK
        log2_chunk_decay = next_log2_chunk_decay
        # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
        next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, chunk - 1, 0, BLOCK_K, spec, per)
        # Before this chunk adds to it, `acc` is the gradient of the state after the chunk.
        if STORE_CHUNK_STATES:
            store_state(state_address(dstates, row, head, chunk, spec), acc, 0, v_start, spec)
        query_base = chunk_address(query, row // per.QUERY, chunk_first_token, q_head, spec.T, spec.HQ, spec.K)
        key_base = chunk_address(key, row // per.KEY, chunk_first_token, k_head, spec.T, spec.HK, spec.K)
        w_base = chunk_address(w, row // per.W, chunk_first_token, head, spec.T, spec.H, spec.K)
        do_base = chunk_address(cotangent, row // per.COTANGENT, chunk_first_token, head, spec.T, spec.H, spec.V)
        intra_chunk_base = chunk_address(
            intra_chunk_dv, row // per.INTRA_CHUNK_DV, chunk_first_token, head, spec.T, spec.H, spec.V
        )
        gates_base = gates_address(gates, row, head, chunk, spec, per)
        # No address depends on `acc`, so the pipeliner can copy the next chunks' tiles during this one's products.
        q = load_token_rows(query_base, chunk_first_token, sequence_end, 0, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, chunk_first_token, sequence_end, 0, spec.HK, spec.K, BLOCK_K, spec)
        w_tile = load_token_rows(w_base, chunk_first_token, sequence_end, 0, spec.H, spec.K, BLOCK_K, spec)
        do = load_token_rows(do_base, chunk_first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        dv_new_tile = load_token_rows(
            intra_chunk_base, chunk_first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec
        ).to(tl.float32)
        # With a gate per head, the products' rows are scaled instead of queries and keys, which stay in shared memory.
        decay_since = spec.OUTPUT_SCALE
        if spec.GATE_CHANNELS == 1:
            gate_cumsum = tl.load(gates_base + rows)
            gate_sum = tl.load(gates_base + (CHUNK - 1))
            # dx reads the gradient after the chunk, so products with `acc` come before its decay.
            dv_new_tile += tl.exp2(gate_sum - gate_cumsum)[:, None] * dot(k, acc.to(k.dtype), spec)
            decay_since = (tl.exp2(gate_cumsum) * spec.OUTPUT_SCALE)[:, None]
            acc *= tl.exp2(gate_sum)
        else:
            dv_new_tile = add_dot(dv_new_tile, k, acc.to(k.dtype), spec)
        if spec.QK_ARE_DECAYED:
            acc *= tl.exp2(log2_chunk_decay)[:, None]
        # Rounded once, so that the scan and `wy_bwd_kernel` use the same dx.
        dx_rounded = dv_new_tile.to(dv_new.dtype.element_ty)
        if STORE_CHUNK_STATES:
            output_base = chunk_address(dv_new, row, chunk_first_token, head, spec.T, spec.H, spec.V)
            store_token_rows(output_base, dx_rounded, chunk_first_token, sequence_end, v_start, spec.H, spec.V, spec)
        # Added by the products' accumulators: `acc += dot(...)` makes Triton 3.6 spill 192 bytes on sm_90
        # (docs/lab/linear_recurrence_gpu.md).
        acc = add_dot(acc, tl.trans(q), (do.to(tl.float32) * decay_since).to(do.dtype), spec)
        if spec.WIDEN_TO_FLOAT32:  # Triton's interpreter would negate the bits of bfloat16
            acc = add_dot(acc, tl.trans(w_tile), -dx_rounded.to(tl.float32), spec)
        else:
            acc = add_dot(acc, tl.trans(w_tile), -dx_rounded, spec)
    state_offset = ((tl.cast(row, tl.int64) * spec.NUM_SEQUENCES + sequence) * spec.H + head) * (spec.K * spec.V)
    store_state(initial_state_gradient + state_offset, acc, 0, v_start, spec)
