"""Computes the gradient of queries, recomputing the scores; see `flash_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, store_tile
from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, tile_gradient
from ejkernel_triton.tiled_attention.kernels.tile import (
    block_at,
    block_list,
    block_run,
    describe_queries,
    kv_bases,
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
    dropout_rows,
    dropout_columns,
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
    LISTS: tl.constexpr,
    per: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """Accumulates for Q_BLOCK queries of one head; tiles are [queries, keys]."""
    BD: tl.constexpr = spec.BD
    program = tl.program_id(0)
    tile = program % TILES
    if REVERSED:  # later queries have more keys: the longest programs start first, so that the tail wave is short
        tile = TILES - 1 - tile
    head = (program // TILES) % spec.H
    batch = program // (TILES * spec.H)
    start = tile * Q_BLOCK
    described = describe_queries(start, batch, head, q_ids, q_positions, dropout_rows, spec, per, Q_BLOCK, True)
    bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
    # Queries, cotangents, lse and delta are loaded once and stay in registers.
    rows = load_queries(start, described, bases, spec, Q_BLOCK, True)
    k_base, v_base = kv_bases(key, value, batch, head // spec.G, spec, per)
    bias_at, mask_at = pair_bases(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_at, dropout_columns)
    masks = (mask_at, tile_masks)
    dq = tl.zeros([Q_BLOCK, BD], tl.float32)
    if LISTS is not None:
        full, count, blocks = block_list(block_lists, batch, head, tile, LISTS, per, TILES)
        # Partial blocks first, as in `flash_bwd_dkdv_kernel`.
        for i in tl.range(full, count):
            n = block_at(blocks, i)
            here = (mask_at, tile_mask_base(tile_masks, tile_mask_id(blocks, i), start, n * K_BLOCK, spec))
            dq = _key_block_step(n, rows, described, keys, here, batch, dq, spec, per, K_BLOCK, MASKED=True)
        for i in tl.range(0, full):
            n = block_at(blocks, i)
            dq = _key_block_step(n, rows, described, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=False)
    else:
        first, full_start, full_end, last = block_run(block_lists, batch, tile, per, TILES)
        before = full_start - first
        for i in tl.range(0, before + last - full_end):
            n = tl.where(i < before, first + i, full_end + i - before)
            dq = _key_block_step(n, rows, described, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=True)
        for n in tl.range(full_start, full_end):
            dq = _key_block_step(n, rows, described, keys, masks, batch, dq, spec, per, K_BLOCK, MASKED=False)
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
