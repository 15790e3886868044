"""Device helpers that the backward kernels share: a tile pair's weights and the gradient of its scores.

load     q, do, lse, delta (`load_queries`)        K, V tile (`tile_score_gradient`)
scores   s = q K^T, scale, bias, soft cap          as in the forward kernel, by `modify_scores`
weights  p = exp2(s - lse), masked to 0            no running maximum: lse is known
products dp = do V^T - delta                       the accumulator starts with -delta
gradient ds = p dp, times the slope of the cap
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot_transposed, dot_transposed, load_tile
from ejkernel_triton.tiled_attention.kernels.tile import (
    apply_dropout,
    as_column_vectors,
    as_row_vectors,
    attending_pairs,
    load_key_info,
    modify_scores,
    to_log2_scores,
)


@triton.jit
def load_queries(start, token_info, bases, spec: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Loads a query tile: queries [Q, BD] and cotangents [Q, BV] as RowTiles; shift of scores, delta and argmax by
    row.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q_base, do_base, shift, delta, argmax = bases
    index, valid, _, _, _ = token_info
    q = load_tile(q_base, start, valid, spec.H * spec.D, spec.D, BLOCK, BD, MASKED)
    do = load_tile(do_base, start, valid, spec.H * spec.DV, spec.DV, BLOCK, BV, MASKED)
    # Rows out of bounds get shift and delta 0, so that their results are finite before masks make them 0. Full blocks
    # load without a mask, which costs time even if it is always true.
    if MASKED:
        row_shift = tl.load(shift + index, mask=valid, other=0.0)
        row_delta = tl.load(delta + index, mask=valid, other=0.0)
    else:
        row_shift = tl.load(shift + index)
        row_delta = tl.load(delta + index)
    row_argmax = index
    if spec.NORMALIZE:
        pass
    else:
        row_argmax = tl.load(argmax + index, mask=valid, other=0)
    q_rows = (q, q_base, start, valid, spec.H * spec.D)
    do_rows = (do, do_base, start, valid, spec.H * spec.DV)
    return q_rows, do_rows, row_shift, row_delta, row_argmax


@triton.jit
def query_bases(query, cotangent, shift, delta, argmax, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Returns the addresses of a head's queries in each of the arrays that `load_queries` reads."""
    q_base = query + (tl.cast(batch // per.QUERY, tl.int64) * spec.T * spec.H + head) * spec.D
    do_base = cotangent + (tl.cast(batch // per.COTANGENT, tl.int64) * spec.T * spec.H + head) * spec.DV
    shift += (tl.cast(batch // per.SHIFT, tl.int64) * spec.H + head) * spec.T
    delta += (tl.cast(batch // per.DELTA, tl.int64) * spec.H + head) * spec.T
    if spec.NORMALIZE:
        pass
    else:
        argmax += (tl.cast(batch // per.ARGMAX, tl.int64) * spec.H + head) * spec.T
    return q_base, do_base, shift, delta, argmax


@triton.jit
def softmax_weights(products, queries, keys, shift, bias, mask_bases, spec: tl.constexpr, MASKED: tl.constexpr):
    """Returns softmax weights of a tile from its products, and the slope of the soft cap."""
    scores, cap_slope = modify_scores(products, queries, keys, bias, spec)
    weights = tl.exp2(to_log2_scores(scores, spec) - shift)
    if MASKED:
        # The shift is that of pairs that attend, so the weight of a masked pair may be inf: it is replaced, not
        # multiplied.
        weights = tl.where(attending_pairs(queries, keys, mask_bases, spec), weights, 0.0)
    return weights, cap_slope


@triton.jit
def score_gradient(weights, cap_slope, a, b, queries, keys, delta, argmax, spec: tl.constexpr, MASKED: tl.constexpr):
    """Returns the gradient of the scaled and biased scores; a b^T of two RowTiles is the gradient of the dropped
    weights.

    It is 0 for pairs that do not attend: their weights are 0, and so is delta in rows that attend to nothing.
    """
    if spec.HAS_DROPOUT:
        # Dropout does not apply to delta, so the accumulator cannot start with it.
        dweights = apply_dropout(dot_transposed(a, b, spec.DV, spec), queries, keys, spec) * spec.KEPT_WEIGHT_SCALE
        if spec.NORMALIZE:
            dweights -= delta
    elif spec.NORMALIZE:  # the accumulator starts with -delta, which then takes no other registers
        dweights = add_dot_transposed(tl.broadcast_to(-delta, weights.shape), a, b, spec.DV, spec)
    else:
        dweights = dot_transposed(a, b, spec.DV, spec)
    # Elements that may be NaN in memory were read as 0.
    gradient = weights * dweights
    if spec.NORMALIZE:
        pass
    else:
        # Here delta is the gradient of the row maximum, which goes to the key that has it.
        k, _, _, _, _ = keys
        gradient -= tl.where(k == argmax, delta, 0.0)
    if spec.SOFT_CAP is not None or spec.SCORE_MOD is not None:
        gradient = gradient * cap_slope
    if MASKED and (spec.HAS_SEGMENTS or spec.SCORE_MOD is not None):
        # Products of other segments' rows may overflow float32, and the derivative of `score_mod` may be infinite for a
        # masked pair: 0 x inf is NaN.
        gradient = tl.where(weights == 0.0, 0.0, gradient)
    return gradient


@triton.jit
def tile_score_gradient(
    n,
    rows,
    queries,
    keys,
    mask_bases,
    batch,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Returns key tile n [K, BD], and the gradient of the scores of a query tile with it, [Q, K]."""
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q, do, row_shift, row_delta, row_argmax = rows
    k_base, v_base, k_ids, k_positions, bias, token_dropout_keys = keys
    start = n * BLOCK_KV
    token_info = load_key_info(start, batch, k_ids, k_positions, token_dropout_keys, spec, per, BLOCK_KV, MASKED)
    _, valid, _, _, _ = token_info
    left, columns = as_column_vectors(queries), as_row_vectors(token_info)
    # K is the operand of two products: of scores here, and of dq in the caller.
    k = load_tile(k_base, start, valid, spec.HK * spec.D, spec.D, BLOCK_KV, BD, MASKED)
    v = load_tile(v_base, start, valid, spec.HK * spec.DV, spec.DV, BLOCK_KV, BV, MASKED)
    k_rows = (k, k_base, start, valid, spec.HK * spec.D)
    v_rows = (v, v_base, start, valid, spec.HK * spec.DV)
    products = dot_transposed(q, k_rows, spec.D, spec)
    weights, cap_slope = softmax_weights(products, left, columns, row_shift[:, None], bias, mask_bases, spec, MASKED)
    gradient = score_gradient(
        weights, cap_slope, do, v_rows, left, columns, row_delta[:, None], row_argmax[:, None], spec, MASKED
    )
    return k, gradient
