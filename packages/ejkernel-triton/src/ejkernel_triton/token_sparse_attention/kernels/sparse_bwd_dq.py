"""Computes the gradient of queries, recomputing the scores: dq_i = scale sum_n p_in (<do_i, v_j> - delta_i) k_j."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.token_sparse_attention.kernels.tile import (
    batch_row_address,
    dot_rows,
    find_list_end,
    list_address,
    load_head_rows,
    load_head_scalars,
    load_indices,
    load_key_tiles,
    load_query_tiles,
    load_values,
    store_head_rows,
)


@triton.jit
def sparse_bwd_dq_kernel(
    query,
    key,
    value,
    indices,
    cotangent,
    lse,
    delta,
    dquery,
    spec: tl.constexpr,
    per: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the gradient of HEADS query heads of one query. `lse` [T, H] is in base 2."""
    HEAD_TILES: tl.constexpr = (spec.G + HEADS - 1) // HEADS
    program = tl.program_id(0)
    kv_head = (program // HEAD_TILES) % spec.HK
    token = (program // (HEAD_TILES * spec.HK)) % spec.T
    batch = program // (HEAD_TILES * spec.HK * spec.T)
    first_head = kv_head * spec.G + (program % HEAD_TILES) * HEADS
    end_head = (kv_head + 1) * spec.G
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key = batch_row_address(key, batch, per.KEY, spec.S * spec.HK * spec.D) + kv_head * spec.D
    value = batch_row_address(value, batch, per.VALUE, spec.S * spec.VALUE_STRIDE)
    value += kv_head * (spec.VALUE_STRIDE // spec.HK)
    cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
    indices = list_address(indices, batch, token, kv_head, per.INDICES, spec)
    lse = batch_row_address(lse, batch, per.LSE, spec.T * spec.H)
    delta = batch_row_address(delta, batch, per.DELTA, spec.T * spec.H)
    q, q_rest = load_query_tiles(query, token, first_head, end_head, HEADS, spec)
    do = load_head_rows(cotangent, token, first_head, end_head, spec.DV, 0, spec.BV, HEADS, spec)
    lse_rows = load_head_scalars(lse, token, first_head, end_head, HEADS, spec)
    delta_rows = load_head_scalars(delta, token, first_head, end_head, HEADS, spec)
    BD: tl.constexpr = spec.BD
    BR: tl.constexpr = spec.BR
    acc = tl.zeros([HEADS, BD], tl.float32)
    acc_rest = 0.0
    if spec.BR:
        acc_rest = tl.zeros([HEADS, BR], tl.float32)
    for first_entry in tl.range(0, find_list_end(indices, BLOCK_KV, spec), BLOCK_KV):
        index = load_indices(indices, first_entry, BLOCK_KV, spec)
        k, k_rest = load_key_tiles(key, index, spec)
        v = load_values(value, index, k, spec)
        scores = dot_rows(q, q_rest, k, k_rest, spec) * spec.LOG2_SCORE_FACTOR
        weights = tl.where((index >= 0)[None, :], tl.exp2(scores - lse_rows[:, None]), 0.0)
        dscores = weights * (dot(do, tl.trans(v), spec) - delta_rows[:, None]) * spec.DSCORE_FACTOR
        dscores = tl.where((index >= 0)[None, :], dscores, 0.0).to(k.dtype)
        acc = add_dot(acc, dscores, k, spec)
        if spec.BR:
            acc_rest = add_dot(acc_rest, dscores, k_rest, spec)
    dquery += tl.cast(batch, tl.int64) * (spec.T * spec.H * spec.D)
    store_head_rows(dquery, token, first_head, end_head, acc * spec.SUM_FACTOR, spec.D, 0, spec.BD, HEADS, spec)
    if spec.BR:
        acc_rest *= spec.SUM_FACTOR
        store_head_rows(dquery, token, first_head, end_head, acc_rest, spec.D, spec.BD, spec.BR, HEADS, spec)
