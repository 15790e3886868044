"""The WY form of the delta rule: the tokens' writes inside of a chunk as a function of the state before it.

A token writes u_i = beta_i (v_i - S'_i^T k_i), where the state S'_i includes the writes of the chunk's earlier tokens.
With S_0 the state before the chunk and cumulative gates G this is a triangular system (WY representation, Yang et al.
2024, arXiv:2406.06484; with gates arXiv:2412.06464):

    L_ij = beta_i exp2(G_i - G_j) <k_i, k_j>   for j < i
    u    = (I + L)^-1 diag(beta) (V - (exp2(G) K) S_0)  =  U - W S_0

    k, g   -> pairs [CHUNK, CHUNK]             in a loop over key channels
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
    chunk_base,
    chunk_span,
    gates_base,
    load_dt,
    load_rows,
    pair_weights,
    scores_at,
    store_rows,
)


@triton.jit
def wy_fast_kernel(
    key,
    value,
    gates,
    beta,
    starts,
    ends,
    u,
    w,
    inverse,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Computes U and W of one head's chunk, and (I + L)^-1 if KEEP; see `forward.wy_fast`."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, C)
    k_base = chunk_base(key, row // per.KEY, start, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    v_base = chunk_base(value, row // per.VALUE, start, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V)
    g_base = gates_base(gates, row, head, chunk, spec, per)
    # 0 past the end: rows of L are 0 there, and the inverse has rows of I.
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    pairs = tl.zeros([C, C], tl.float32)
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        pairs = add_dot(pairs, k, tl.trans(k), spec)
    g = 0.0
    if spec.WIDTH == 1:
        g = tl.load(g_base + rows)
        pairs *= pair_weights(g)
    # Strictly lower: a token reads the state before it writes.
    lower = tl.where(rows[:, None] > rows[None, :], pairs * betas[:, None], 0.0)
    unit_inverted = solve_tril(lower, spec)
    # Stored without beta, in the keys' dtype: the backward pass multiplies with it on the tensor cores.
    if KEEP:
        tl.store(scores_at(inverse, row, head, chunk, spec), unit_inverted.to(inverse.dtype.element_ty))
    # beta scales the columns of the inverse instead of V and K: once, and in float32.
    ut = unit_inverted * betas[None, :]
    # U: one product per tile of values.
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_rows(v_base, start, end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        to = chunk_base(u, row, start, head, spec.T, spec.H, spec.V)
        store_rows(to, dot(ut.to(v.dtype), v, spec), start, end, v_start, spec.H, spec.V, spec)
    decayed_ut = ut
    # W reads the state at the chunk's first token: exp2(G_j) of the key's token, again on columns.
    if spec.WIDTH == 1:
        decayed_ut = ut * tl.exp2(g)[None, :]
    for k_start in tl.range(0, spec.K, BLOCK_K):
        k = load_rows(k_base, start, end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        to = chunk_base(w, row, start, head, spec.T, spec.H, spec.K)
        store_rows(to, dot(decayed_ut.to(k.dtype), k, spec), start, end, k_start, spec.H, spec.K, spec)
