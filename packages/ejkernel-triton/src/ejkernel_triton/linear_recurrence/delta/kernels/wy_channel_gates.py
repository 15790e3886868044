"""Computes the WY form with gates per key channel, in one kernel that reads the gates once.

Cumulative gates take as many bytes as queries and keys together. So they are not stored for other kernels: operands
that read the state or are written to it are stored with their decay, of which none is above 1:

    in a loop over key channels
        decay      -> G, G_T - G
        q, k       -> q exp2(G), k exp2(G), k exp2(G_T - G)                 stored
        q, k, decay -> pairs of queries and keys, pairs of keys and keys    see `sub_chunk_scores`
    pairs          -> scores, and L -> (I + L)^-1                           see `wy_fast`
    V              -> U
    k exp2(G), reloaded from W's memory  -> W

The kernels that read the state apply the decay of a chunk, exp2(G_T), in registers.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.delta.kernels.solve_tril import solve_tril
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    SINCE_START_MATRIX_INDEX,
    UNTIL_END_MATRIX_INDEX,
    load_log_gates,
    multiply_by_decay,
    split_gates_high_low,
    sub_chunk_scores,
    sum_gates,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    causal_mask,
    chunk_address,
    chunk_start_and_sequence_end,
    load_token_rows,
    load_token_scalars,
    score_pointers,
    store_token_rows,
)


@triton.jit
def store_causal_scores(scores, qk_scores, row, head, chunk, spec: tl.constexpr):
    """Stores scores of queries and keys, 0 above the diagonal."""
    tl.store(
        score_pointers(scores, row, head, chunk, spec),
        tl.where(causal_mask(spec), qk_scores, 0.0).to(scores.dtype.element_ty),
    )


@triton.jit
def solve_wy_form(
    kk_scores,
    arrays,
    chunk_location,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STORE_INVERSE: tl.constexpr,
):
    """Computes U and W of one head's chunk, and (I + L)^-1 if STORE_INVERSE, from unmasked products of keys and keys.

    `w` has the decayed keys, which W replaces.
    """
    row, head, chunk, first_token, sequence_end = chunk_location
    beta, value, u, w, inverse = arrays
    rows = tl.arange(0, spec.CHUNK_SIZE)
    # 0 past the end: rows of L are 0 there, and the inverse has rows of I.
    betas = load_token_scalars(beta, row // per.BETA, first_token, sequence_end, head, spec)
    strictly_lower = tl.where(rows[:, None] > rows[None, :], kk_scores * betas[:, None], 0.0)
    inverse_tile = solve_tril(strictly_lower, spec)
    if STORE_INVERSE:
        tl.store(score_pointers(inverse, row, head, chunk, spec), inverse_tile.to(inverse.dtype.element_ty))
    inverse_times_beta = (inverse_tile * betas[None, :]).to(value.dtype.element_ty)
    value_base = chunk_address(
        value, row // per.VALUE, first_token, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V
    )
    u_address = chunk_address(u, row, first_token, head, spec.T, spec.H, spec.V)
    w_address = chunk_address(w, row, first_token, head, spec.T, spec.H, spec.K)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_token_rows(value_base, first_token, sequence_end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        store_token_rows(
            u_address, dot(inverse_times_beta, v, spec), first_token, sequence_end, v_start, spec.H, spec.V, spec
        )
    tl.debug_barrier()  # other threads wrote the keys that a thread reads
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_token_rows(w_address, first_token, sequence_end, k_start, spec.H, spec.K, BLOCK_K, spec)
        w_tile = dot(inverse_times_beta, k, spec)
        tl.debug_barrier()  # all threads have read their keys before W overwrites them
        store_token_rows(w_address, w_tile, first_token, sequence_end, k_start, spec.H, spec.K, spec)


@triton.jit
def wy_channel_gates_kernel(
    query,
    key,
    value,
    decay,
    beta,
    gate_sum_matrix_address,
    chunk_starts,
    sequence_ends,
    u,
    w,
    inverse,
    scores,
    decayed_query,
    decayed_key,
    chunk_gate_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STORE_INVERSE: tl.constexpr,
):
    """Computes all of one head's chunk; T is 1 for a decay that is the same for all tokens.

    See `forward.wy_channel_gates`.
    """
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
    dstates_base = chunk_address(decay, row // per.DECAY, first_token * (T > 1), head, T, spec.H, spec.K)
    DECAY_STRIDE: tl.constexpr = (T > 1) * spec.H * spec.K
    w_address = chunk_address(w, row, first_token, head, spec.T, spec.H, spec.K)
    decayed_query_address = chunk_address(decayed_query, row, first_token, head, spec.T, spec.H, spec.K)
    decayed_key_address = chunk_address(decayed_key, row, first_token, head, spec.T, spec.H, spec.K)
    gate_sum_address = chunk_gate_sums + ((tl.cast(row, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * spec.K
    qk_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    kk_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K, num_stages=1, disable_licm=True):
        gates = load_log_gates(dstates_base, first_token, sequence_end, k_start, DECAY_STRIDE, BLOCK_K, spec)
        q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        columns = k_start + tl.arange(0, BLOCK_K)
        tl.store(gate_sum_address + columns, tl.sum(gates, 0), mask=columns < spec.K)
        gates_high, gates_low = split_gates_high_low(gates, k.dtype)
        decay_until = tl.exp2(sum_gates(gate_sum_matrix_address, UNTIL_END_MATRIX_INDEX, gates_high, gates_low, spec))
        store_token_rows(
            decayed_key_address,
            multiply_by_decay(k, decay_until),
            first_token,
            sequence_end,
            k_start,
            spec.H,
            spec.K,
            spec,
        )
        decay_since = tl.exp2(sum_gates(gate_sum_matrix_address, SINCE_START_MATRIX_INDEX, gates_high, gates_low, spec))
        store_token_rows(
            decayed_query_address,
            multiply_by_decay(q, decay_since),
            first_token,
            sequence_end,
            k_start,
            spec.H,
            spec.K,
            spec,
        )
        store_token_rows(
            w_address, multiply_by_decay(k, decay_since), first_token, sequence_end, k_start, spec.H, spec.K, spec
        )
        qk_scores, kk_scores = sub_chunk_scores(
            qk_scores, kk_scores, q, k, gates_high, gates_low, gate_sum_matrix_address, spec
        )
    store_causal_scores(scores, qk_scores, row, head, chunk, spec)
    arrays = (beta, value, u, w, inverse)
    solve_wy_form(
        kk_scores, arrays, (row, head, chunk, first_token, sequence_end), spec, per, BLOCK_K, BLOCK_V, STORE_INVERSE
    )
