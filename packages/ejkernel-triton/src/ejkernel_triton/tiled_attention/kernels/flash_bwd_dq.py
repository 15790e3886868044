"""Computes the gradient of queries, recomputing the scores; see `flash_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, store_tile
from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, tile_score_gradient
from ejkernel_triton.tiled_attention.kernels.tile import (
    consecutive_block_bounds,
    kv_bases,
    listed_block,
    load_block_list,
    load_query_info,
    pair_bases,
    tile_mask_base,
    tile_mask_id,
)


@triton.jit
def flash_bwd_dq_kernel(
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
    dquery,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    LIST_SHAPE: tl.constexpr,
    per: tl.constexpr,
    REVERSE_TILES: tl.constexpr,
):
    """Accumulates for BLOCK_Q queries of one head; tiles are [queries, keys]."""
    BD: tl.constexpr = spec.BD
    program = tl.program_id(0)
    tile = program % NUM_TILES
    if REVERSE_TILES:  # later queries have more keys: the longest programs start first, so that the tail wave is short
        tile = NUM_TILES - 1 - tile
    head = (program // NUM_TILES) % spec.H
    batch = program // (NUM_TILES * spec.H)
    start = tile * BLOCK_Q
    token_info = load_query_info(start, batch, head, q_ids, q_positions, dropout_row_keys, spec, per, BLOCK_Q, True)
    bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
    # Queries, cotangents, lse and delta are loaded once and stay in registers.
    rows = load_queries(start, token_info, bases, spec, BLOCK_Q, True)
    k_base, v_base = kv_bases(key, value, batch, head // spec.G, spec, per)
    bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_base, dropout_column_keys)
    mask_bases = (mask_base, tile_masks)
    dq = tl.zeros([BLOCK_Q, BD], tl.float32)
    if LIST_SHAPE is not None:
        num_full_blocks, num_blocks, blocks = load_block_list(
            block_lists, batch, head, tile, LIST_SHAPE, per, NUM_TILES
        )
        # Partial blocks first, as in `flash_bwd_dkdv_kernel`.
        for i in tl.range(num_full_blocks, num_blocks):
            n = listed_block(blocks, i)
            pattern_masks = (mask_base, tile_mask_base(tile_masks, tile_mask_id(blocks, i), start, n * BLOCK_KV, spec))
            dq = _key_block_step(n, rows, token_info, keys, pattern_masks, batch, dq, spec, per, BLOCK_KV, MASKED=True)
        for i in tl.range(0, num_full_blocks):
            n = listed_block(blocks, i)
            dq = _key_block_step(n, rows, token_info, keys, mask_bases, batch, dq, spec, per, BLOCK_KV, MASKED=False)
    else:
        first, full_start, full_end, last = consecutive_block_bounds(block_lists, batch, tile, per, NUM_TILES)
        num_leading_partial = full_start - first
        for i in tl.range(0, num_leading_partial + last - full_end):
            n = tl.where(i < num_leading_partial, first + i, full_end + i - num_leading_partial)
            dq = _key_block_step(n, rows, token_info, keys, mask_bases, batch, dq, spec, per, BLOCK_KV, MASKED=True)
        for n in tl.range(full_start, full_end):
            dq = _key_block_step(n, rows, token_info, keys, mask_bases, batch, dq, spec, per, BLOCK_KV, MASKED=False)
    # The factor of scores is applied once, not in every step.
    base = dquery + (tl.cast(batch, tl.int64) * spec.T * spec.H + head) * spec.D
    store_tile(base, start, dq * spec.SCALE, spec.H * spec.D, spec.T, spec.D, BLOCK_Q, BD)


@triton.jit
def _key_block_step(
    n,
    rows,
    queries,
    keys,
    mask_bases,
    batch,
    dq,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of key tile n to dq [Q, BD]."""
    k, gradient = tile_score_gradient(n, rows, queries, keys, mask_bases, batch, spec, per, BLOCK_KV, MASKED)
    return add_dot(dq, gradient.to(k.dtype), k, spec)
