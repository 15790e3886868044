"""The backward kernels, which recompute the scores (Dao et al. 2022): one for keys and values, one for queries.

    flash_bwd_dkdv: K, V stay in registers       flash_bwd_dq: q, do, lse, delta stay in registers
    per query head of the KV head, per           per key tile:
    query tile, partial blocks first:              K tile --> s = q K^T --> p = exp2(s - lse), masked*
      q tile  --> s^T = K q^T --> p^T masked*      V tile --> dp = do V^T - delta
      do tile --> dv += p^T do                                ds = p * dp
                  dp^T = V do^T - delta                       dq += ds K
                  dk += (p^T * dp^T) q           * partial blocks only

Tiles of `flash_bwd_dkdv` are transposed, [keys, queries], so that the weights are the left operand of both of its sums.
Each program writes its gradient alone, so there are no atomics, and results are reproducible bit for bit. The price is
that scores are recomputed twice.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot_transposed, load_tile, store_tile
from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, score_gradient, softmax_weights
from ejkernel_triton.tiled_attention.kernels.tile import (
    apply_dropout,
    as_column_vectors,
    as_row_vectors,
    consecutive_block_bounds,
    kv_bases,
    listed_block,
    load_block_list,
    load_key_info,
    load_query_info,
    pair_bases,
    tile_mask_base,
    tile_mask_id,
)


@triton.jit
def flash_bwd_dkdv_kernel(
    query,
    key,
    value,
    block_lists,
    q_ids,
    k_ids,
    q_positions,
    k_positions,
    bias,
    mask,
    sinks,
    dropout_row_keys,
    dropout_column_keys,
    tile_masks,
    cotangent,
    shift,
    delta,
    argmax,
    dkey,
    dvalue,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    LIST_SHAPE: tl.constexpr,
    per: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Accumulates the gradients of BLOCK_KV keys of one KV head over its query heads; tiles are [keys, queries].

    It computes the gradient of the keys if DK and that of the values if DV: both, if registers suffice.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % NUM_TILES
    kv_head = (program // NUM_TILES) % spec.HK
    batch = program // (NUM_TILES * spec.HK)
    start = tile * BLOCK_KV
    token_info = load_key_info(start, batch, k_ids, k_positions, dropout_column_keys, spec, per, BLOCK_KV, True)
    _, valid, _, _, _ = token_info
    k_base, v_base = kv_bases(key, value, batch, kv_head, spec, per)
    # Padding and keys past the end are read as 0. Masks make their weights 0, so their gradients are 0 or not stored.
    k = load_tile(k_base, start, valid, spec.HK * spec.D, spec.D, BLOCK_KV, BD, True)
    v = k
    if DK:  # only the keys' gradient needs the values
        v = load_tile(v_base, start, valid, spec.HK * spec.DV, spec.DV, BLOCK_KV, BV, True)
    keys = (k, k_base, start, valid, spec.HK * spec.D), (v, v_base, start, valid, spec.HK * spec.DV), token_info
    dk = tl.zeros([BLOCK_KV, BD], tl.float32)
    dv = tl.zeros([BLOCK_KV, BV], tl.float32)
    if LIST_SHAPE is None:  # the same blocks for every head: their bounds are loaded once
        first, full_start, full_end, last = consecutive_block_bounds(block_lists, batch, tile, per, NUM_TILES)
        num_leading_partial = full_start - first
    # GQA: the query heads of the KV head add to the same accumulators, in a fixed order.
    for head_in_group in range(spec.G):
        head = kv_head * spec.G + head_in_group
        bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
        bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
        query_inputs = (q_ids, q_positions, dropout_row_keys, bias_base)
        mask_bases = (mask_base, tile_masks)
        # Partial blocks come first: the compiler then keeps the values of all loops in registers.
        if LIST_SHAPE is not None:
            num_full_blocks, num_blocks, blocks = load_block_list(
                block_lists, batch, head, tile, LIST_SHAPE, per, NUM_TILES
            )
            for i in tl.range(num_full_blocks, num_blocks):
                n = listed_block(blocks, i)
                pattern_masks = (
                    mask_base,
                    tile_mask_base(tile_masks, tile_mask_id(blocks, i), n * BLOCK_Q, start, spec),
                )
                dk, dv = _query_block_step(
                    n,
                    keys,
                    pattern_masks,
                    batch,
                    head,
                    bases,
                    query_inputs,
                    dk,
                    dv,
                    spec,
                    per,
                    BLOCK_Q,
                    DK,
                    DV,
                    MASKED=True,
                )
            for i in tl.range(0, num_full_blocks):
                n = listed_block(blocks, i)
                dk, dv = _query_block_step(
                    n,
                    keys,
                    mask_bases,
                    batch,
                    head,
                    bases,
                    query_inputs,
                    dk,
                    dv,
                    spec,
                    per,
                    BLOCK_Q,
                    DK,
                    DV,
                    MASKED=False,
                )
        else:
            for i in tl.range(0, num_leading_partial + last - full_end):
                n = tl.where(i < num_leading_partial, first + i, full_end + i - num_leading_partial)
                dk, dv = _query_block_step(
                    n,
                    keys,
                    mask_bases,
                    batch,
                    head,
                    bases,
                    query_inputs,
                    dk,
                    dv,
                    spec,
                    per,
                    BLOCK_Q,
                    DK,
                    DV,
                    MASKED=True,
                )
            for n in tl.range(full_start, full_end):
                dk, dv = _query_block_step(
                    n,
                    keys,
                    mask_bases,
                    batch,
                    head,
                    bases,
                    query_inputs,
                    dk,
                    dv,
                    spec,
                    per,
                    BLOCK_Q,
                    DK,
                    DV,
                    MASKED=False,
                )
    # The factors of scores and of dropout are applied once, not in every step.
    row = tl.cast(batch, tl.int64) * spec.S * spec.HK + kv_head
    if DK:
        store_tile(dkey + row * spec.D, start, dk * spec.SCALE, spec.HK * spec.D, spec.S, spec.D, BLOCK_KV, BD)
    if DV:
        store_tile(
            dvalue + row * spec.DV, start, dv * spec.KEPT_WEIGHT_SCALE, spec.HK * spec.DV, spec.S, spec.DV, BLOCK_KV, BV
        )


@triton.jit
def _query_block_step(
    n,
    keys,
    mask_bases,
    batch,
    head,
    bases,
    query_inputs,
    dk,
    dv,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of query tile n to dk [K, BD] and dv [K, BV]."""
    k, v, key_info = keys
    q_ids, q_positions, token_dropout_keys, bias = query_inputs
    start = n * BLOCK_Q
    token_info = load_query_info(start, batch, head, q_ids, q_positions, token_dropout_keys, spec, per, BLOCK_Q, MASKED)
    queries, rows = as_row_vectors(token_info), as_column_vectors(key_info)
    q, do, row_shift, row_delta, row_argmax = load_queries(start, token_info, bases, spec, BLOCK_Q, MASKED)
    # Scores are recomputed. Transposed, P^T and ds^T are left operands with their layout in registers; a right operand
    # would go through shared memory.
    products = dot_transposed(k, q, spec.D, spec)
    weights, cap_slope = softmax_weights(products, queries, rows, row_shift[None, :], bias, mask_bases, spec, MASKED)
    q_tile, _, _, _, _ = q
    do_tile, _, _, _, _ = do
    # Dropout acts on the weights of values only; `score_gradient` uses the weights before dropout.
    if DV:
        dv = add_dot(dv, apply_dropout(weights, queries, rows, spec).to(do_tile.dtype), do_tile, spec)
    if DK:
        gradient = score_gradient(
            weights, cap_slope, v, do, queries, rows, row_delta[None, :], row_argmax[None, :], spec, MASKED
        )
        dk = add_dot(dk, gradient.to(q_tile.dtype), q_tile, spec)
    return dk, dv
