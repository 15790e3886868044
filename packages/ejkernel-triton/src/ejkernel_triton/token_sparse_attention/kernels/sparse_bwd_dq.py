"""Computes the gradient of queries, recomputing the scores: dq_i = scale sum_n p_in (<do_i, v_j> - delta_i) k_j."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, dot
from ejkernel_triton.token_sparse_attention.kernels.tile import (
    dot_rows,
    find_list_end,
    find_query_program,
    key_and_value_addresses,
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
    log2_lse,
    delta,
    dquery,
    spec: tl.constexpr,
    per: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the gradient of HEADS query heads of one query."""
    batch, token, kv_head, first_head, end_head = find_query_program(tl.program_id(0), HEADS, spec)
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key, value = key_and_value_addresses(key, value, batch, kv_head, per, spec)
    cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
    indices = list_address(indices, batch, token, kv_head, per.INDICES, spec)
    log2_lse = batch_row_address(log2_lse, batch, per.LOG2_LSE, spec.T * spec.H)
    delta = batch_row_address(delta, batch, per.DELTA, spec.T * spec.H)
    q, q_rest = load_query_tiles(query, token, first_head, end_head, HEADS, spec)
    do = load_head_rows(cotangent, token, first_head, end_head, spec.DV, 0, spec.BV, HEADS, spec)
    log2_lse_rows = load_head_scalars(log2_lse, token, first_head, end_head, HEADS, spec)
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
        weights = tl.where((index >= 0)[None, :], tl.exp2(scores - log2_lse_rows[:, None]), 0.0)
        dscores = weights * (dot(do, tl.trans(v), spec) - delta_rows[:, None]) * spec.DSCORE_FACTOR
        dscores = tl.where((index >= 0)[None, :], dscores, 0.0).to(k.dtype)
        acc = add_dot(acc, dscores, k, spec)
        if spec.BR:
            acc_rest = add_dot(acc_rest, dscores, k_rest, spec)
    dquery += batch * (spec.T * spec.H * spec.D)
    store_head_rows(dquery, token, first_head, end_head, acc * spec.SUM_FACTOR, spec.D, 0, spec.BD, HEADS, spec)
    if spec.BR:
        acc_rest *= spec.SUM_FACTOR
        store_head_rows(dquery, token, first_head, end_head, acc_rest, spec.D, spec.BD, spec.BR, HEADS, spec)
