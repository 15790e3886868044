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

from ejkernel_triton.blocks import add_dot, dot_rows, load_tile, store_tile
from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, score_gradient, weights_of
from ejkernel_triton.tiled_attention.kernels.tile import (
    as_columns,
    as_rows,
    block_at,
    block_list,
    block_run,
    describe_keys,
    describe_queries,
    drop,
    kv_bases,
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
    dropout_rows,
    dropout_columns,
    tile_masks,
    cotangent,
    shift,
    delta,
    argmax,
    dkey,
    dvalue,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LISTS: tl.constexpr,
    per: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Accumulates the gradients of K_BLOCK keys of one KV head over its query heads; tiles are [keys, queries].

    It computes the gradient of the keys if DK and that of the values if DV: both, if registers suffice.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % TILES
    kv_head = (program // TILES) % spec.HK
    batch = program // (TILES * spec.HK)
    start = tile * K_BLOCK
    described = describe_keys(start, batch, k_ids, k_positions, dropout_columns, spec, per, K_BLOCK, True)
    _, valid, _, _, _ = described
    k_base, v_base = kv_bases(key, value, batch, kv_head, spec, per)
    # Padding and keys past the end are read as 0. Masks make their weights 0, so their gradients are 0 or not stored.
    k = load_tile(k_base, start, valid, spec.HK * spec.D, spec.D, K_BLOCK, BD, True)
    v = k
    if DK:  # only the keys' gradient needs the values
        v = load_tile(v_base, start, valid, spec.HK * spec.DV, spec.DV, K_BLOCK, BV, True)
    keys = (k, k_base, start, valid, spec.HK * spec.D), (v, v_base, start, valid, spec.HK * spec.DV), described
    dk = tl.zeros([K_BLOCK, BD], tl.float32)
    dv = tl.zeros([K_BLOCK, BV], tl.float32)
    if LISTS is None:  # the same blocks for every head: their bounds are loaded once
        first, full_start, full_end, last = block_run(block_lists, batch, tile, per, TILES)
        before = full_start - first
    # GQA: the query heads of the KV head add to the same accumulators, in a fixed order.
    for member in range(spec.G):
        head = kv_head * spec.G + member
        bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
        bias_at, mask_at = pair_bases(bias, mask, batch, head, spec, per)
        about = (q_ids, q_positions, dropout_rows, bias_at)
        masks = (mask_at, tile_masks)
        # Partial blocks come first: the compiler then keeps the values of all loops in registers.
        if LISTS is not None:
            full, count, blocks = block_list(block_lists, batch, head, tile, LISTS, per, TILES)
            for i in tl.range(full, count):
                n = block_at(blocks, i)
                here = (mask_at, tile_mask_base(tile_masks, tile_mask_id(blocks, i), n * Q_BLOCK, start, spec))
                dk, dv = _query_block_step(
                    n, keys, here, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=True
                )
            for i in tl.range(0, full):
                n = block_at(blocks, i)
                dk, dv = _query_block_step(
                    n, keys, masks, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=False
                )
        else:
            for i in tl.range(0, before + last - full_end):
                n = tl.where(i < before, first + i, full_end + i - before)
                dk, dv = _query_block_step(
                    n, keys, masks, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=True
                )
            for n in tl.range(full_start, full_end):
                dk, dv = _query_block_step(
                    n, keys, masks, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=False
                )
    # The factors of scores and of dropout are applied once, not in every step.
    row = tl.cast(batch, tl.int64) * spec.S * spec.HK + kv_head
    if DK:
        store_tile(dkey + row * spec.D, start, dk * spec.SCALE, spec.HK * spec.D, spec.S, spec.D, K_BLOCK, BD)
    if DV:
        store_tile(dvalue + row * spec.DV, start, dv * spec.KEPT, spec.HK * spec.DV, spec.S, spec.DV, K_BLOCK, BV)


@triton.jit
def _query_block_step(
    n,
    keys,
    masks,
    batch,
    head,
    bases,
    about,
    dk,
    dv,
    spec: tl.constexpr,
    per: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of query tile n to dk [K, BD] and dv [K, BV]."""
    k, v, described_keys = keys
    q_ids, q_positions, dropout_keys, bias = about
    start = n * Q_BLOCK
    described = describe_queries(start, batch, head, q_ids, q_positions, dropout_keys, spec, per, Q_BLOCK, MASKED)
    queries, rows = as_columns(described), as_rows(described_keys)
    q, do, row_shift, row_delta, row_argmax = load_queries(start, described, bases, spec, Q_BLOCK, MASKED)
    # Scores are recomputed. Transposed, P^T and ds^T are left operands with their layout in registers; a right operand
    # would go through shared memory.
    products = dot_rows(k, q, spec.D, spec)
    weights, slope = weights_of(products, queries, rows, row_shift[None, :], bias, masks, spec, MASKED)
    q_tile, _, _, _, _ = q
    do_tile, _, _, _, _ = do
    # Dropout acts on the weights of values only; `score_gradient` uses the weights before dropout.
    if DV:
        dv = add_dot(dv, drop(weights, queries, rows, spec).to(do_tile.dtype), do_tile, spec)
    if DK:
        gradient = score_gradient(
            weights, slope, v, do, queries, rows, row_delta[None, :], row_argmax[None, :], spec, MASKED
        )
        dk = add_dot(dk, gradient.to(q_tile.dtype), q_tile, spec)
    return dk, dv
