"""The forward kernel: online softmax of one query, with all heads of a KV head, over its listed blocks.

                       +------------------------ per key tile of every listed block -------------------------+
    q  (registers) --->|  K tile --> s = q K^T, masked --> m' = max(m, s) --> p = exp2(s - m')                 |
                       |                                   alpha = exp2(m - m')                               |
                       |  V tile ---------------------------------------> acc = alpha acc + p V               |
                       +--------------------------------------------------------------------------------------+
    epilogue: output = acc / l, lse = m + log l

Neighbouring queries list different blocks, so a tile of scores has only the heads of one KV head: 16 rows, one MMA of a
warp. With one warp per program warps exchange nothing, and as many programs as fit shared memory keep their copies in
flight; the bottleneck is L2 bandwidth for keys and values.

Source: native sparse attention, Yuan et al. 2025, arXiv:2502.11089, section 3.4.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2, add_dot, dot, minus_inf_to_zero
from ejkernel_triton.selected_attention.kernels.tile import (
    batch_row_address,
    find_block_list_end,
    load_block_start,
    load_head_rows,
    load_keys,
    load_query_position,
    mask_attending_keys,
    store_head_rows,
)


@triton.jit
def selected_fwd_kernel(
    query,
    key,
    value,
    block_list,
    block_starts,
    q_positions,
    q_segment_ids,
    k_segment_ids,
    output,
    lse,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the output of one query and KV head. Programs of a KV head are consecutive, and share keys in L2."""
    program = tl.program_id(0)
    token = program % spec.T
    head = (program // spec.T) % spec.HK
    batch = program // (spec.T * spec.HK)
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key = batch_row_address(key, batch, per.KEY, spec.S * spec.HK * spec.D) + head * spec.D
    value = batch_row_address(value, batch, per.VALUE, spec.S * spec.HK * spec.DV) + head * spec.DV
    block_list = batch_row_address(block_list, batch, per.BLOCK_LIST, spec.T * spec.HK * spec.NUM_LISTED_BLOCKS)
    block_list += tl.cast(token * spec.HK + head, tl.int64) * spec.NUM_LISTED_BLOCKS
    if spec.HAS_BLOCK_STARTS:
        block_starts = batch_row_address(block_starts, batch, per.BLOCK_STARTS, spec.M)
    if spec.HAS_POSITIONS:
        q_positions = batch_row_address(q_positions, batch, per.Q_POSITIONS, spec.T)
    # Slots after the last listed block cost nothing; an empty slot before it is a tile without keys.
    count = find_block_list_end(block_list, spec)
    q_id = 0
    if spec.HAS_SEGMENTS:
        k_segment_ids = batch_row_address(k_segment_ids, batch, per.K_SEGMENT_IDS, spec.S)
        q_id = tl.load(batch_row_address(q_segment_ids, batch, per.Q_SEGMENT_IDS, spec.T) + token)
        count = tl.where(q_id >= 0, count, 0)  # padding attends to nothing
    q_position = load_query_position(q_positions, token, spec)
    BG: tl.constexpr = spec.BG
    BV: tl.constexpr = spec.BV
    TILES: tl.constexpr = (spec.BLOCK_SIZE + BLOCK_KV - 1) // BLOCK_KV
    # Rows that pad the group to 16 are 0; they are computed like the others and not stored.
    q = load_head_rows(query, token, head, spec.D, spec.BD, spec)
    row_max = tl.full([BG], float("-inf"), tl.float32)
    row_sum = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BV], tl.float32)
    # One loop over the tiles of all listed blocks: the pipeline drains at the end of each loop, so a loop per block
    # would be slower.
    for i in tl.range(0, count * TILES):
        block = tl.load(block_list + i // TILES)
        index = (i % TILES) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        start = load_block_start(block_starts, block, spec)
        # Keys out of bounds are read as 0: their weights are 0, and 0 x NaN would be NaN.
        valid = (index < tl.where(block >= 0, spec.BLOCK_SIZE, 0)) & (start + index < spec.S)
        k = load_keys(key, start, index, valid, spec.D, spec.BD, spec)
        v = load_keys(value, start, index, valid, spec.DV, BV, spec)
        attend_mask = mask_attending_keys(k_segment_ids, start + index, valid, q_position, q_id, spec)
        row_max, row_sum, acc = softmax_step(q, k, v, attend_mask, row_max, row_sum, acc, spec)
    # Epilogue. A query without keys has denominator 0: its output is 0, its lse -inf.
    denominator = tl.where(row_sum > 0.0, row_sum, 1.0)
    lse_row = tl.where(row_sum > 0.0, (tl.log2(denominator) + minus_inf_to_zero(row_max)) * LN2, float("-inf"))
    g = tl.arange(0, BG)
    # lse is [B, H, T], as the family's residuals are: a stride of T between the heads of a query.
    rows = (tl.cast(batch, tl.int64) * spec.H + head * spec.G + g) * spec.T + token
    tl.store(lse + rows, lse_row, mask=g < spec.G)
    output += tl.cast(batch, tl.int64) * (spec.T * spec.H * spec.DV)
    store_head_rows(output, token, head, acc / denominator[:, None], spec.DV, BV, spec)


@triton.jit
def softmax_step(q, k, v, attend_mask, row_max, row_sum, acc, spec: tl.constexpr):
    """Performs one step of the online softmax, over a tile of keys.

    q [BG, BD], k [K, BD], v [K, BV], attends [K], row_max and row_sum [BG], acc [BG, BV].
    """
    # All rows of the tile are heads of one query, so they have the same mask.
    scores = tl.where(attend_mask[None, :], dot(q, tl.trans(k), spec) * spec.LOG2_SCORE_FACTOR, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = minus_inf_to_zero(new_max)  # a tile may have no key that attends
    weights = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    # Weights are converted to the values' dtype for the matrix unit; the accumulator stays float32.
    acc = add_dot(acc * alpha[:, None], weights.to(v.dtype), v, spec)
    return new_max, row_sum, acc
