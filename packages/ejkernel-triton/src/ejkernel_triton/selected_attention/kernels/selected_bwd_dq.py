"""Computes the gradient of queries, recomputing the scores; see `selected_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.selected_attention.kernels.tile import (
    batch_row_address,
    find_block_list_end,
    load_block_start,
    load_head_rows,
    load_head_scalars,
    load_keys,
    load_query_position,
    mask_attending_keys,
    store_head_rows,
)


@triton.jit
def selected_bwd_dq_kernel(
    query,
    key,
    value,
    block_list,
    block_starts,
    q_positions,
    q_segment_ids,
    k_segment_ids,
    cotangent,
    log2_lse,
    delta,
    dquery,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the gradient of one query, for all query heads of one KV head."""
    program = tl.program_id(0)
    token = program % spec.T
    head = (program // spec.T) % spec.HK
    batch = program // (spec.T * spec.HK)
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key = batch_row_address(key, batch, per.KEY, spec.S * spec.HK * spec.D) + head * spec.D
    value = batch_row_address(value, batch, per.VALUE, spec.S * spec.HK * spec.DV) + head * spec.DV
    cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
    log2_lse = batch_row_address(log2_lse, batch, per.LOG2_LSE, spec.T * spec.H)
    delta = batch_row_address(delta, batch, per.DELTA, spec.T * spec.H)
    block_list = batch_row_address(block_list, batch, per.BLOCK_LIST, spec.T * spec.HK * spec.NUM_LISTED_BLOCKS)
    block_list += tl.cast(token * spec.HK + head, tl.int64) * spec.NUM_LISTED_BLOCKS
    if spec.HAS_BLOCK_STARTS:
        block_starts = batch_row_address(block_starts, batch, per.BLOCK_STARTS, spec.M)
    if spec.HAS_POSITIONS:
        q_positions = batch_row_address(q_positions, batch, per.Q_POSITIONS, spec.T)
    count = find_block_list_end(block_list, spec)
    q_id = 0
    if spec.HAS_SEGMENTS:
        k_segment_ids = batch_row_address(k_segment_ids, batch, per.K_SEGMENT_IDS, spec.S)
        q_id = tl.load(batch_row_address(q_segment_ids, batch, per.Q_SEGMENT_IDS, spec.T) + token)
        # Padding attends to nothing: the loop has no steps, and the stored gradient is 0.
        count = tl.where(q_id >= 0, count, 0)
    q_position = load_query_position(q_positions, token, spec)
    TILES: tl.constexpr = (spec.BLOCK_SIZE + BLOCK_KV - 1) // BLOCK_KV
    BG: tl.constexpr = spec.BG
    BD: tl.constexpr = spec.BD
    # The program's query, with all heads of the KV head, stays in registers.
    q = load_head_rows(query, token, head, spec.D, BD, spec)
    do = load_head_rows(cotangent, token, head, spec.DV, spec.BV, spec)
    lse = load_head_scalars(log2_lse, token, head, spec)
    delta_row = load_head_scalars(delta, token, head, spec)
    acc = tl.zeros([BG, BD], tl.float32)
    # One loop over the tiles of all listed blocks, as in the forward kernel.
    for i in tl.range(0, count * TILES):
        block = tl.load(block_list + i // TILES)
        index = (i % TILES) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        start = load_block_start(block_starts, block, spec)
        valid = (index < tl.where(block >= 0, spec.BLOCK_SIZE, 0)) & (start + index < spec.S)
        k = load_keys(key, start, index, valid, spec.D, BD, spec)
        v = load_keys(value, start, index, valid, spec.DV, spec.BV, spec)
        attends = mask_attending_keys(k_segment_ids, start + index, valid, q_position, q_id, spec)
        scores = dot(q, tl.trans(k), spec) * spec.LOG2_SCORE_FACTOR
        # Masked weights are replaced after exp2, which may be inf for keys that lse does not include.
        weights = tl.where(attends[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        dscores = weights * (dot(do, tl.trans(v), spec) - delta_row[:, None])
        if spec.HAS_SEGMENTS:  # products of other segments' rows may be inf, and 0 x inf is NaN
            dscores = tl.where(attends[None, :], dscores, 0.0)
        # K is loaded once for two products, of scores and of dq.
        acc = add_dot(acc, dscores.to(k.dtype), k, spec)
    dquery += tl.cast(batch, tl.int64) * (spec.T * spec.H * spec.D)
    store_head_rows(dquery, token, head, acc * spec.SCORE_SCALE, spec.D, BD, spec)
