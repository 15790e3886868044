"""Computes the gradient of queries, recomputing the scores; see `flash_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, store_tile
from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, tile_gradient
from ejkernel_triton.tiled_attention.kernels.tile import (
    consecutive_blocks,
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
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LIST_SHAPE: tl.constexpr,
    per: tl.constexpr,
    REVERSE_TILES: tl.constexpr,
):
    """Accumulates for Q_BLOCK queries of one head; tiles are [queries, keys]."""
    BD: tl.constexpr = spec.BD
    program = tl.program_id(0)
    tile = program % TILES
    if REVERSE_TILES:  # later queries have more keys: the longest programs start first, so that the tail wave is short
        tile = TILES - 1 - tile
    head = (program // TILES) % spec.H
    batch = program // (TILES * spec.H)
    start = tile * Q_BLOCK
    token_info = load_query_info(start, batch, head, q_ids, q_positions, dropout_row_keys, spec, per, Q_BLOCK, True)
    bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
    # Queries, cotangents, lse and delta are loaded once and stay in registers.
    rows = load_queries(start, token_info, bases, spec, Q_BLOCK, True)
    k_base, v_base = kv_bases(key, value, batch, head // spec.G, spec, per)
    bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_base, dropout_column_keys)
    masks = (mask_base, tile_masks)
    dq = tl.zeros([Q_BLOCK, BD], tl.float32)
    if LIST_SHAPE is not None:
        num_full_blocks, num_blocks, blocks = load_block_list(block_lists, batch, head, tile, LIST_SHAPE, per, TILES)
        # Partial blocks first, as in `flash_bwd_dkdv_kernel`.
        for i in tl.range(num_full_blocks, num_blocks):
            n = listed_block(blocks, i)
            pattern_masks = (mask_base, tile_mask_base(tile_masks, tile_mask_id(blocks, i), start, n * K_BLOCK, spec))
            dq = _key_block_step(n, rows, token_info, keys, pattern_masks, batch, dq, spec, per, K_BLOCK, MASKED=True)
        for i in tl.range(0, num_full_blocks):
            n = listed_block(blocks, i)
            dq = _key_block_step(n, rows, token_info, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=False)
    else:
        first, full_start, full_end, last = consecutive_blocks(block_lists, batch, tile, per, TILES)
        num_leading_partial = full_start - first
        for i in tl.range(0, num_leading_partial + last - full_end):
            n = tl.where(i < num_leading_partial, first + i, full_end + i - num_leading_partial)
            dq = _key_block_step(n, rows, token_info, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=True)
        for n in tl.range(full_start, full_end):
            dq = _key_block_step(n, rows, token_info, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=False)
    # The factor of scores is applied once, not in every step.
    base = dquery + (tl.cast(batch, tl.int64) * spec.T * spec.H + head) * spec.D
    store_tile(base, start, dq * spec.SCALE, spec.H * spec.D, spec.T, spec.D, Q_BLOCK, BD)


@triton.jit
def _key_block_step(
    n,
    rows,
    queries,
    keys,
    masks,
    batch,
    dq,
    spec: tl.constexpr,
    per: tl.constexpr,
    K_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of key tile n to dq [Q, BD]."""
    k, gradient = tile_gradient(n, rows, queries, keys, masks, batch, spec, per, K_BLOCK, MASKED)
    return add_dot(dq, gradient.to(k.dtype), k, spec)
