"""The forward kernel with tangents: online softmax of one query tile, and its derivative along those of its operands.

With s, p, m and l of `flash_fwd`, and ds the tangents of the scores, a key tile adds

    ds  = (dq K^T + q dK^T) * scale * slope of the soft cap
    c   = exp2(m - m') c   + rowsum(p ds)
    da  = exp2(m - m') da  + dropout(p ds) V + dropout(p) dV

and at the end `dlse = c / l` and `doutput = da / l - output dlse`. The maximum has no tangent: it cancels. That
makes six products per tile where `flash_fwd` has two.

Source: derived from the softmax by the product rule; Lu & Song 2024, arXiv:2410.11081, appendix, has the same form.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, add_dot, dot, load_tile, minus_inf_to_zero, store_tile
from ejkernel_triton.tiled_attention.kernels.tile import (
    apply_dropout,
    as_column_vectors,
    as_row_vectors,
    attending_pairs,
    consecutive_block_bounds,
    kv_bases,
    load_key_info,
    load_query_info,
    log2_to_log,
    modify_scores,
    pair_bases,
    to_log2_scores,
)


@triton.jit
def flash_fwd_tangents_kernel(
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
    query_tangent,
    key_tangent,
    value_tangent,
    output,
    lse,
    output_tangent,
    lse_tangent,
    spec: tl.constexpr,
    moved: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    per: tl.constexpr,
    REVERSE_TILES: tl.constexpr,
):
    """Computes output and tangents of BLOCK_Q queries of one head; `moved` says which operands have tangents."""
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % NUM_TILES
    if REVERSE_TILES:  # later queries have more keys: the longest programs start first, so that the tail wave is short
        tile = NUM_TILES - 1 - tile
    head = (program // NUM_TILES) % spec.H
    batch = program // (NUM_TILES * spec.H)
    start = tile * BLOCK_Q
    token_info = load_query_info(start, batch, head, q_ids, q_positions, dropout_row_keys, spec, per, BLOCK_Q, True)
    index, _, _, _, _ = token_info
    queries = as_column_vectors(token_info)
    valid = index < spec.T
    q_base = query + (tl.cast(batch // per.QUERY, tl.int64) * spec.T * spec.H + head) * spec.D
    q = load_tile(q_base, start, valid, spec.H * spec.D, spec.D, BLOCK_Q, BD, spec.T % BLOCK_Q > 0)
    q_tangent = q  # a placeholder where queries have no tangent
    if moved.QUERY:
        base = query_tangent + (tl.cast(batch // per.QUERY_TANGENT, tl.int64) * spec.T * spec.H + head) * spec.D
        q_tangent = load_tile(base, start, valid, spec.H * spec.D, spec.D, BLOCK_Q, BD, spec.T % BLOCK_Q > 0)
    bases = kv_bases(key, value, batch, head // spec.G, spec, per)
    tangent_bases = _tangent_bases(key_tangent, value_tangent, batch, head // spec.G, spec, moved, per)
    bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
    keys = (bases, tangent_bases, k_ids, k_positions, bias_base, dropout_column_keys)
    mask_bases = (mask_base, tile_masks)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BV], tl.float32)
    sum_tangent = tl.zeros([BLOCK_Q], tl.float32)
    acc_tangent = tl.zeros([BLOCK_Q, BV], tl.float32)
    rows = (q, q_tangent)
    first, full_start, full_end, last = consecutive_block_bounds(block_lists, batch, tile, per, NUM_TILES)
    for n in tl.range(full_start, full_end):
        row_max, row_sum, acc, sum_tangent, acc_tangent = _key_block_step(
            n,
            rows,
            queries,
            keys,
            mask_bases,
            batch,
            row_max,
            row_sum,
            acc,
            sum_tangent,
            acc_tangent,
            spec,
            moved,
            per,
            BLOCK_KV,
            False,
        )
    num_leading_partial = full_start - first
    for i in tl.range(0, num_leading_partial + last - full_end):
        n = tl.where(i < num_leading_partial, first + i, full_end + i - num_leading_partial)
        row_max, row_sum, acc, sum_tangent, acc_tangent = _key_block_step(
            n,
            rows,
            queries,
            keys,
            mask_bases,
            batch,
            row_max,
            row_sum,
            acc,
            sum_tangent,
            acc_tangent,
            spec,
            moved,
            per,
            BLOCK_KV,
            True,
        )
    # Without a sink, a row that attends to nothing has base 0 and denominator 0: output and tangents 0, lse -inf.
    row_base = minus_inf_to_zero(row_max)
    factor = tl.full([BLOCK_Q], 1.0, tl.float32)
    if spec.HAS_SINKS:
        sink = tl.load(sinks + (batch // per.SINKS) * spec.H + head) * LOG2E
        row_base = minus_inf_to_zero(tl.maximum(row_max, sink))
        factor = tl.exp2(row_max - row_base)
        row_sum = row_sum * factor + tl.exp2(sink - row_base)
    positive_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    mean = sum_tangent * factor / positive_sum
    out = acc * (factor * spec.KEPT_WEIGHT_SCALE / positive_sum)[:, None]
    out_tangent = acc_tangent * (factor * spec.KEPT_WEIGHT_SCALE / positive_sum)[:, None] - out * mean[:, None]
    row = tl.cast(batch, tl.int64)
    places = (row * spec.H + head) * spec.T + index
    row_lse = tl.where(row_sum > 0.0, log2_to_log(tl.log2(positive_sum) + row_base, row_base, spec), float("-inf"))
    tl.store(lse + places, row_lse, mask=valid)
    tl.store(lse_tangent + places, mean, mask=valid)
    offset = (row * spec.T * spec.H + head) * spec.DV
    store_tile(output + offset, start, out, spec.H * spec.DV, spec.T, spec.DV, BLOCK_Q, BV)
    store_tile(output_tangent + offset, start, out_tangent, spec.H * spec.DV, spec.T, spec.DV, BLOCK_Q, BV)


@triton.jit
def _tangent_bases(key_tangent, value_tangent, batch, head, spec: tl.constexpr, moved: tl.constexpr, per: tl.constexpr):
    """Returns the addresses of a KV head and batch row in the tangents of keys and values; the pointers without."""
    if moved.KEY:
        key_tangent += (tl.cast(batch // per.KEY_TANGENT, tl.int64) * spec.S * spec.HK + head) * spec.D
    if moved.VALUE:
        value_tangent += (tl.cast(batch // per.VALUE_TANGENT, tl.int64) * spec.S * spec.HK + head) * spec.DV
    return key_tangent, value_tangent


@triton.jit
def _key_block_step(
    n,
    rows,
    queries,
    keys,
    mask_bases,
    batch,
    row_max,
    row_sum,
    acc,
    sum_tangent,
    acc_tangent,
    spec: tl.constexpr,
    moved: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Updates the running softmax and its tangents with key tile n; row_max, row_sum [Q], acc [Q, BV]."""
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q, q_tangent = rows
    bases, tangent_bases, k_ids, k_positions, bias, token_dropout_keys = keys
    k_base, v_base = bases
    k_tangent_base, v_tangent_base = tangent_bases
    start = n * BLOCK_KV
    token_info = load_key_info(start, batch, k_ids, k_positions, token_dropout_keys, spec, per, BLOCK_KV, MASKED)
    _, valid, _, _, _ = token_info
    columns = as_row_vectors(token_info)
    k = load_tile(k_base, start, valid, spec.HK * spec.D, spec.D, BLOCK_KV, BD, MASKED)
    products = dot(q, tl.trans(k), spec)
    scores, cap_slope = modify_scores(products, queries, columns, bias, spec)
    score_tangents = tl.zeros([q.shape[0], BLOCK_KV], tl.float32)
    if moved.QUERY:
        score_tangents = add_dot(score_tangents, q_tangent, tl.trans(k), spec)
    if moved.KEY:
        k_tangent = load_tile(k_tangent_base, start, valid, spec.HK * spec.D, spec.D, BLOCK_KV, BD, MASKED)
        score_tangents = add_dot(score_tangents, q, tl.trans(k_tangent), spec)
    score_tangents = score_tangents * spec.SCALE * cap_slope
    if MASKED:
        scores = tl.where(attending_pairs(queries, columns, mask_bases, spec), scores, float("-inf"))
    if MASKED or spec.BIAS_STRIDES is not None:
        # The weight is 0, and 0 times a NaN of a pair that does not attend would be NaN.
        score_tangents = tl.where(scores == float("-inf"), 0.0, score_tangents)
    new_max = tl.maximum(row_max, to_log2_scores(tl.max(scores, 1), spec))
    shift = new_max
    if MASKED or spec.BIAS_STRIDES is not None:  # a row may have no key so far: -inf - -inf would be NaN
        shift = minus_inf_to_zero(new_max)
    weights = tl.exp2(to_log2_scores(scores, spec) - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    changes = weights * score_tangents
    sum_tangent = sum_tangent * alpha + tl.sum(changes, 1)
    v = load_tile(v_base, start, valid, spec.HK * spec.DV, spec.DV, BLOCK_KV, BV, MASKED)
    kept = apply_dropout(weights, queries, columns, spec).to(v.dtype)
    acc = add_dot(acc * alpha[:, None], kept, v, spec)
    acc_tangent = acc_tangent * alpha[:, None]
    if moved.QUERY or moved.KEY:
        acc_tangent = add_dot(acc_tangent, apply_dropout(changes, queries, columns, spec).to(v.dtype), v, spec)
    if moved.VALUE:
        v_tangent = load_tile(v_tangent_base, start, valid, spec.HK * spec.DV, spec.DV, BLOCK_KV, BV, MASKED)
        acc_tangent = add_dot(acc_tangent, kept, v_tangent, spec)
    return new_max, row_sum, acc, sum_tangent, acc_tangent
