"""The forward kernel: online softmax of one query, with heads of a KV head, over the keys that it lists.

                       +-------------------------- per tile of listed keys --------------------------------+
    list --> indices ->|  K rows, gathered --> s = q K^T, masked --> m' = max(m, s) --> p = exp2(s - m')   |
    q (shared memory)  |                                             alpha = exp2(m - m')                  |
                       |  V rows (in the latent form the K tile) --> acc = alpha acc + p V                 |
                       +-----------------------------------------------------------------------------------+
    epilogue: output = acc / l, lse = m + log l

Neighbouring queries list different keys, so a tile of scores has the heads of one query as rows. Programs of the same
query and KV head, 2 of 64 heads in the latent form, are consecutive and read the same keys from L2.

Source: the attention of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2, LOG2E, add_dot, batch_row_address, minus_inf_to_zero
from ejkernel_triton.token_sparse_attention.kernels.tile import (
    dot_rows,
    find_list_end,
    find_query_program,
    key_and_value_addresses,
    list_address,
    load_indices,
    load_key_tiles,
    load_query_tiles,
    load_values,
    store_head_rows,
)


@triton.jit
def sparse_fwd_kernel(
    query,
    key,
    value,
    indices,
    sinks,
    output,
    lse,
    spec: tl.constexpr,
    per: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the output of HEADS query heads of one query."""
    batch, token, kv_head, first_head, end_head = find_query_program(tl.program_id(0), HEADS, spec)
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key, value = key_and_value_addresses(key, value, batch, kv_head, per, spec)
    indices = list_address(indices, batch, token, kv_head, per.INDICES, spec)
    q, q_rest = load_query_tiles(query, token, first_head, end_head, HEADS, spec)
    heads = first_head + tl.arange(0, HEADS)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    if spec.HAS_SINKS:
        sinks = batch_row_address(sinks, batch, per.SINKS, spec.H)
        row_max = tl.load(sinks + heads, mask=heads < end_head, other=float("-inf")) * LOG2E
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    BV: tl.constexpr = spec.BV
    acc = tl.zeros([HEADS, BV], tl.float32)
    for first_entry in tl.range(0, find_list_end(indices, BLOCK_KV, spec), BLOCK_KV):
        index = load_indices(indices, first_entry, BLOCK_KV, spec)
        k, k_rest = load_key_tiles(key, index, spec)
        v = load_values(value, index, k, spec)
        scores = dot_rows(q, q_rest, k, k_rest, spec) * spec.LOG2_SCORE_FACTOR
        # All rows of the tile are heads of one query, so they have the same mask.
        scores = tl.where((index >= 0)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = minus_inf_to_zero(new_max)  # a tile may have no key at all
        weights = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        acc = add_dot(acc * alpha[:, None], weights.to(v.dtype), v, spec)
        row_max = new_max
    # A query without keys and sinks has denominator 0: its output is 0, its lse -inf. NaN is not equal to 0.
    attends = row_sum != 0.0
    denominator = tl.where(attends, row_sum, 1.0)
    lse_row = tl.where(attends, (tl.log2(denominator) + minus_inf_to_zero(row_max)) * LN2, float("-inf"))
    # lse is [B, H, T], as the family's residuals are.
    tl.store(lse + (batch * spec.H + heads) * spec.T + token, lse_row, mask=heads < end_head)
    output += batch * (spec.T * spec.H * spec.DV)
    out = acc / denominator[:, None]
    store_head_rows(output, token, first_head, end_head, out, spec.DV, 0, spec.BV, HEADS, spec)
