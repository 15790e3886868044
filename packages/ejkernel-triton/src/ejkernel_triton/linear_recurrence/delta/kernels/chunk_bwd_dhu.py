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
    chunk_base,
    gates_base,
    load_chunk_decay,
    load_rows,
    load_state,
    nth_sequence,
    scan_span,
    state_base,
    store_rows,
    store_state,
)
from ejkernel_triton.linear_recurrence.segments.kernels.effective_length import load_effective_length


@triton.jit
def chunk_bwd_dhu_kernel(
    query,
    key,
    gates,
    w,
    cotangent,
    intra_chunk,
    final,
    bounds,
    first_chunks,
    order,
    lengths,
    dstates,
    first_gradient,
    dv_new,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FINAL: tl.constexpr,
    WRITE: tl.constexpr,
    OFFSET: tl.constexpr,
    LENGTH_TILES: tl.constexpr,
):
    """Passes BLOCK_V columns of the gradient of one head's state from the last chunk of a sequence to the first.

    A program holds all key channels, padded to BLOCK_K, since dx is a sum over them.
    """
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.SEQUENCES
    sequence = nth_sequence(order, row, program % spec.SEQUENCES, spec, per)
    first, last, sequence_start, end = scan_span(bounds, first_chunks, row, sequence + OFFSET, spec, per)
    if LENGTH_TILES > 0:
        # The gradient at the segment's start: chunks whose contribution decays to nothing on the way there are skipped.
        SEGMENTS: tl.constexpr = (spec.CHUNKS + spec.PER_SEQUENCE - 1) // spec.PER_SEQUENCE
        last = tl.minimum(
            last, first + load_effective_length(lengths, row, sequence + OFFSET, head, SEGMENTS, LENGTH_TILES, spec)
        )
    rows = tl.arange(0, C)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FINAL:
        final_row = tl.cast(row // per.FINAL, tl.int64) * spec.SEQUENCES + sequence
        state_offset = (final_row * spec.H + head) * (spec.K * spec.V)
        # The scan starts with the cotangent of the final state.
        acc = load_state(final + state_offset, 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    q_head = head // (spec.H // spec.HQ)
    k_head = head // (spec.H // spec.HK)
    next_decay = load_chunk_decay(gates, row, head, last - 1, 0, BLOCK_K, spec, per)
    for step in tl.range(0, last - first):
        chunk = last - 1 - step
        start = sequence_start + (chunk - first) * C
        chunk_decay = next_decay
        # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
        next_decay = load_chunk_decay(gates, row, head, chunk - 1, 0, BLOCK_K, spec, per)
        # Before this chunk adds to it, `acc` is the gradient of the state after the chunk.
        if WRITE:
            store_state(state_base(dstates, row, head, chunk, spec), acc, 0, v_start, spec)
        q_base = chunk_base(query, row // per.QUERY, start, q_head, spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, k_head, spec.T, spec.HK, spec.K)
        w_base = chunk_base(w, row // per.W, start, head, spec.T, spec.H, spec.K)
        o_base = chunk_base(cotangent, row // per.COTANGENT, start, head, spec.T, spec.H, spec.V)
        x_base = chunk_base(intra_chunk, row // per.INTRA_CHUNK, start, head, spec.T, spec.H, spec.V)
        g_base = gates_base(gates, row, head, chunk, spec, per)
        # No address depends on `acc`, so the pipeliner can copy the next chunks' tiles during this one's products.
        q = load_rows(q_base, start, end, 0, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, 0, spec.HK, spec.K, BLOCK_K, spec)
        w_tile = load_rows(w_base, start, end, 0, spec.H, spec.K, BLOCK_K, spec)
        do = load_rows(o_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        dx = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec).to(tl.float32)
        # With a gate per head, the products' rows are scaled instead of queries and keys, which stay in shared memory.
        decay_since = spec.SCALE
        if spec.WIDTH == 1:
            g = tl.load(g_base + rows)
            total = tl.load(g_base + (C - 1))
            # dx reads the gradient after the chunk, so products with `acc` come before its decay.
            dx += tl.exp2(total - g)[:, None] * dot(k, acc.to(k.dtype), spec)
            decay_since = (tl.exp2(g) * spec.SCALE)[:, None]
            acc *= tl.exp2(total)
        else:
            dx = add_dot(dx, k, acc.to(k.dtype), spec)
        if spec.DECAYED:
            acc *= tl.exp2(chunk_decay)[:, None]
        # Rounded once, so that the scan and `wy_bwd_kernel` use the same dx.
        low = dx.to(dv_new.dtype.element_ty)
        if WRITE:
            to = chunk_base(dv_new, row, start, head, spec.T, spec.H, spec.V)
            store_rows(to, low, start, end, v_start, spec.H, spec.V, spec)
        # Added by the products' accumulators: `acc += dot(...)` makes Triton 3.6 spill 192 bytes on sm_90
        # (docs/lab/linear_recurrence_gpu.md).
        acc = add_dot(acc, tl.trans(q), (do.to(tl.float32) * decay_since).to(do.dtype), spec)
        if spec.WIDEN:  # Triton's interpreter would negate the bits of bfloat16
            acc = add_dot(acc, tl.trans(w_tile), -low.to(tl.float32), spec)
        else:
            acc = add_dot(acc, tl.trans(w_tile), -low, spec)
    state_offset = ((tl.cast(row, tl.int64) * spec.SEQUENCES + sequence) * spec.H + head) * (spec.K * spec.V)
    store_state(first_gradient + state_offset, acc, 0, v_start, spec)
