"""The WY form of the delta rule: the tokens' writes inside of a chunk as a function of the state before it.

A token writes u_i = beta_i (v_i - S'_i^T k_i), where the state S'_i includes the writes of the chunk's earlier tokens.
With S_0 the state before the chunk and cumulative gates G this is a triangular system (WY representation, Yang et al.
2024, arXiv:2406.06484; with gates arXiv:2412.06464):

    L_ij = beta_i exp2(G_i - G_j) <k_i, k_j>   for j < i
    u    = (I + L)^-1 diag(beta) (V - (exp2(G) K) S_0)  =  U - W S_0

    k, g   -> pairs [CHUNK_SIZE, CHUNK_SIZE]             in a loop over key channels
    L      -> (I + L)^-1                       blocks of 16 rows, then by blocks
    V      -> U,  exp2(G) K -> W               two products, in loops over value and over key channels

U and W do not depend on the state, so all chunks are computed in parallel. The backward pass needs (I + L)^-1 itself,
without beta, which may be 0.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.delta.kernels.solve_tril import solve_tril
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    gates_address,
    load_token_rows,
    load_token_scalars,
    pairwise_decay,
    score_pointers,
    store_token_rows,
)


@triton.jit
def wy_fast_kernel(
    key,
    value,
    gates,
    beta,
    chunk_starts,
    sequence_ends,
    u,
    w,
    inverse,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STORE_INVERSE: tl.constexpr,
):
    """Computes U and W of one head's chunk, and (I + L)^-1 if STORE_INVERSE; see `forward.wy_fast`."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    rows = tl.arange(0, CHUNK)
    key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    value_base = chunk_address(
        value, row // per.VALUE, first_token, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V
    )
    gates_base = gates_address(gates, row, head, chunk, spec, per)
    # 0 past the end: rows of L are 0 there, and the inverse has rows of I.
    betas = load_token_scalars(beta, row // per.BETA, first_token, sequence_end, head, spec)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        pairs = add_dot(pairs, k, tl.trans(k), spec)
    gate_cumsum = 0.0
    if spec.GATE_CHANNELS == 1:
        gate_cumsum = tl.load(gates_base + rows)
        pairs *= pairwise_decay(gate_cumsum)
    # Strictly lower: a token reads the state before it writes.
    strictly_lower = tl.where(rows[:, None] > rows[None, :], pairs * betas[:, None], 0.0)
    inverse_tile = solve_tril(strictly_lower, spec)
    # Stored without beta, in the keys' dtype: the backward pass multiplies with it on the tensor cores.
    if STORE_INVERSE:
        tl.store(score_pointers(inverse, row, head, chunk, spec), inverse_tile.to(inverse.dtype.element_ty))
    # beta scales the columns of the inverse instead of V and K: once, and in float32.
    inverse_times_beta = inverse_tile * betas[None, :]
    # U: one product per tile of values.
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_token_rows(value_base, first_token, sequence_end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        output_base = chunk_address(u, row, first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(
            output_base,
            dot(inverse_times_beta.to(v.dtype), v, spec),
            first_token,
            sequence_end,
            v_start,
            spec.H,
            spec.V,
            spec,
        )
    inverse_times_beta_decay = inverse_times_beta
    # W reads the state at the chunk's first token: exp2(G_j) of the key's token, again on columns.
    if spec.GATE_CHANNELS == 1:
        inverse_times_beta_decay = inverse_times_beta * tl.exp2(gate_cumsum)[None, :]
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        output_base = chunk_address(w, row, first_token, head, spec.T, spec.H, spec.K)
        store_token_rows(
            output_base,
            dot(inverse_times_beta_decay.to(k.dtype), k, spec),
            first_token,
            sequence_end,
            k_start,
            spec.H,
            spec.K,
            spec,
        )
