"""Computes the gradient of the bias: every program accumulates a tile of it over all that the bias broadcasts over.

for batch rows, heads, query tiles, key tiles that share the tile of the bias:
    ds = p * (do V^T - delta), through the soft cap          as in `flash_bwd_dq`
    acc += ds                                                [queries, keys], in registers
store acc, summed over the axes of size 1
"""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention.kernels.bwd_tile import load_queries, query_bases, tile_score_gradient
from ejkernel_triton.tiled_attention.kernels.tile import (
    consecutive_block_bounds,
    kv_bases,
    load_query_info,
    pair_bases,
    tile_mask_base,
)


@triton.jit
def flash_bwd_dbias_kernel(
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
    dbias,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_Q_TILES: tl.constexpr,
    NUM_K_TILES: tl.constexpr,
    BIAS_SIZES: tl.constexpr,
    LIST_SHAPE: tl.constexpr,
    per: tl.constexpr,
):
    """Computes a tile of the gradient. BIAS_SIZES are the bias's sizes over head, query and key: 1 where it broadcasts.

    The grid has as many programs along an axis as the bias has tiles; where it broadcasts, one, which loops. With lists
    of blocks `block_lists` is the block map itself, [heads, query tiles, key tiles]: the id of a tile's mask, or -1 for
    an empty block. LIST_SHAPE is then (heads, key tiles). The bias may stand for an element that `score_mod` loads
    (`spec.DIFFERENTIATES_LOAD`).
    """
    GRID_K: tl.constexpr = NUM_K_TILES if BIAS_SIZES[2] > 1 else 1
    GRID_Q: tl.constexpr = NUM_Q_TILES if BIAS_SIZES[1] > 1 else 1
    program = tl.program_id(0)
    k_tile = program % GRID_K
    q_tile = (program // GRID_K) % GRID_Q
    bias_head = (program // (GRID_K * GRID_Q)) % BIAS_SIZES[0]
    bias_row = program // (GRID_K * GRID_Q * BIAS_SIZES[0])
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    # Loops over the axes that the bias broadcasts over; along an axis that the bias has, a loop takes one step. One
    # program adds in a fixed order, so results are reproducible bit for bit.
    for b in range(per.DBIAS):
        batch = bias_row * per.DBIAS + b
        for h in range(spec.H // BIAS_SIZES[0]):
            head = bias_head + h
            bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
            k_base, v_base = kv_bases(key, value, batch, head // spec.G, spec, per)
            bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
            keys = (k_base, v_base, k_ids, k_positions, bias_base, dropout_column_keys)
            mask_bases = (mask_base, tile_masks)
            for i in range(NUM_Q_TILES // GRID_Q):
                tile = q_tile + i
                start = tile * BLOCK_Q
                token_info = load_query_info(
                    start, batch, head, q_ids, q_positions, dropout_row_keys, spec, per, BLOCK_Q, True
                )
                rows = load_queries(start, token_info, bases, spec, BLOCK_Q, True)
                if LIST_SHAPE is not None:
                    map_row = batch // per.BLOCK_LISTS
                    if LIST_SHAPE[0] > 1:
                        map_row = map_row * LIST_SHAPE[0] + head
                    ids = block_lists + (tl.cast(map_row, tl.int64) * NUM_Q_TILES + tile) * NUM_K_TILES
                    for n in tl.range(k_tile, k_tile + NUM_K_TILES // GRID_K):
                        # Empty blocks of the pattern cost only this load.
                        id = tl.load(ids + n)
                        if id >= 0:
                            pattern_masks = (mask_base, tile_mask_base(tile_masks, id, start, n * BLOCK_KV, spec))
                            _, gradient = tile_score_gradient(
                                n, rows, token_info, keys, pattern_masks, batch, spec, per, BLOCK_KV, True
                            )
                            acc += gradient
                else:
                    first, _full_start, _full_end, last = consecutive_block_bounds(
                        block_lists, batch, tile, per, NUM_Q_TILES
                    )
                    # The blocks of the query tile, clipped to the key tiles that this program accumulates for.
                    first_block = tl.maximum(first, k_tile)
                    end_block = tl.minimum(last, k_tile + NUM_K_TILES // GRID_K)
                    for n in tl.range(first_block, end_block):
                        _, gradient = tile_score_gradient(
                            n, rows, token_info, keys, mask_bases, batch, spec, per, BLOCK_KV, True
                        )
                        acc += gradient
    if spec.BIAS_STRIDES is None:  # an element that `score_mod` loads
        HEAD_SIZE: tl.constexpr = BIAS_SIZES[1] * BIAS_SIZES[2]
        base = dbias + (tl.cast(bias_row, tl.int64) * BIAS_SIZES[0] + bias_head) * HEAD_SIZE
    else:
        base = (
            dbias
            + tl.cast(bias_row, tl.int64) * spec.BIAS_STRIDES[0]
            + tl.cast(bias_head, tl.int64) * spec.BIAS_STRIDES[1]
        )
    _store_bias_gradient(base, acc, q_tile * BLOCK_Q, k_tile * BLOCK_KV, BLOCK_Q, BLOCK_KV, BIAS_SIZES)


@triton.jit
def _store_bias_gradient(
    base, acc, q_start, k_start, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BIAS_SIZES: tl.constexpr
):
    """Sums [Q, K] over the axes that broadcast, and stores the result."""
    q = q_start + tl.arange(0, BLOCK_Q)
    k = k_start + tl.arange(0, BLOCK_KV)
    # Rows and columns out of bounds were masked to 0, so sums include whole tiles.
    if BIAS_SIZES[1] == 1:
        if BIAS_SIZES[2] == 1:
            tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(base.dtype.element_ty))
        else:
            tl.store(base + k, tl.sum(acc, 0).to(base.dtype.element_ty), mask=k < BIAS_SIZES[2])
    else:
        if BIAS_SIZES[2] == 1:
            tl.store(base + q, tl.sum(acc, 1).to(base.dtype.element_ty), mask=q < BIAS_SIZES[1])
        else:
            at = base + (tl.cast(q, tl.int64)[:, None] * BIAS_SIZES[2] + k[None, :])
            tl.store(
                at, acc.to(base.dtype.element_ty), mask=(q < BIAS_SIZES[1])[:, None] & (k < BIAS_SIZES[2])[None, :]
            )
