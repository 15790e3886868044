"""The forward kernel: online softmax of one query tile over its key tiles.

                       +--------------------- per key tile: full blocks, then partial blocks ---------------------+
    q  (registers) --->|  K tile --> s = q K^T --> mask* --> m' = max(m, s) --> p = exp2(s - m')                    |
                       |                                      alpha = exp2(m - m')                                  |
                       |  V tile ------------------------------------------> acc = alpha acc + p V                  |
                       |                                                     l   = alpha l   + sum(p)               |
                       +--------------------------------------------------------------------------------------------+
    epilogue: sink joins l, output = acc / l, lse = m + log l             * partial blocks only

Triton's software pipeliner copies the K and V tiles of the next `num_stages - 1` blocks into shared memory meanwhile.

Sources: Milakov & Gimelshein 2018 (online softmax); Dao 2023, arXiv:2307.08691 (order of the loops).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, add_dot, dot, dot_transposed, load_tile, minus_inf_to_zero, store_tile
from ejkernel_triton.tiled_attention.kernels.tile import (
    apply_dropout,
    as_column_vectors,
    as_row_vectors,
    attending_pairs,
    consecutive_block_bounds,
    kv_bases,
    listed_block,
    load_block_list,
    load_key_info,
    load_query_info,
    log2_to_log,
    modify_scores,
    pair_bases,
    tile_mask_base,
    tile_mask_id,
    to_log2_scores,
)


@triton.jit
def flash_fwd_kernel(
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
    output,
    lse,
    max_out,
    argmax_out,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_TILES: tl.constexpr,
    LIST_SHAPE: tl.constexpr,
    per: tl.constexpr,
    REVERSE_TILES: tl.constexpr,
):
    """Computes the output of BLOCK_Q queries of one head; consecutive programs share keys and values in L2.

    `max_out` and `argmax_out` are None for normalised outputs. LIST_SHAPE is (heads, row length) of `block_lists` with
    a pattern, None without.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % NUM_TILES
    if REVERSE_TILES:  # later queries have more keys: the longest programs start first, so that the tail wave is short
        tile = NUM_TILES - 1 - tile
    head = (program // NUM_TILES) % spec.H
    batch = program // (NUM_TILES * spec.H)
    start = tile * BLOCK_Q
    # Prologue: the query tile stays in registers for the whole loop. Rows past the end are read as 0, computed like the
    # others and not stored.
    token_info = load_query_info(start, batch, head, q_ids, q_positions, dropout_row_keys, spec, per, BLOCK_Q, True)
    index, _, _, _, _ = token_info
    queries = as_column_vectors(token_info)
    q_base = query + (tl.cast(batch // per.QUERY, tl.int64) * spec.T * spec.H + head) * spec.D
    q = load_tile(q_base, start, index < spec.T, spec.H * spec.D, spec.D, BLOCK_Q, BD, spec.T % BLOCK_Q > 0)
    q_rows = (q, q_base, start, index < spec.T, spec.H * spec.D)
    k_base, v_base = kv_bases(key, value, batch, head // spec.G, spec, per)
    bias_base, mask_base = pair_bases(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_base, dropout_column_keys)
    mask_bases = (mask_base, tile_masks)
    # State of the online softmax: maxima in log2; sums and accumulator are not normalised before the epilogue.
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_argmax = tl.zeros([BLOCK_Q], tl.int32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BV], tl.float32)
    if LIST_SHAPE is not None:
        # Two loops with one body, in which MASKED is a constant: full blocks compile without comparisons and bounds
        # checks.
        num_full_blocks, num_blocks, blocks = load_block_list(
            block_lists, batch, head, tile, LIST_SHAPE, per, NUM_TILES
        )
        for i in tl.range(0, num_full_blocks):
            n = listed_block(blocks, i)
            row_max, row_argmax, row_sum, acc = _key_block_step(
                n,
                q_rows,
                queries,
                keys,
                mask_bases,
                batch,
                row_max,
                row_argmax,
                row_sum,
                acc,
                spec,
                per,
                BLOCK_KV,
                False,
            )
        for i in tl.range(num_full_blocks, num_blocks):
            n = listed_block(blocks, i)
            pattern_masks = (mask_base, tile_mask_base(tile_masks, tile_mask_id(blocks, i), start, n * BLOCK_KV, spec))
            row_max, row_argmax, row_sum, acc = _key_block_step(
                n,
                q_rows,
                queries,
                keys,
                pattern_masks,
                batch,
                row_max,
                row_argmax,
                row_sum,
                acc,
                spec,
                per,
                BLOCK_KV,
                True,
            )
    else:
        # Without a pattern the blocks are consecutive, so a tile reads four integers and no list.
        first, full_start, full_end, last = consecutive_block_bounds(block_lists, batch, tile, per, NUM_TILES)
        for n in tl.range(full_start, full_end):
            row_max, row_argmax, row_sum, acc = _key_block_step(
                n,
                q_rows,
                queries,
                keys,
                mask_bases,
                batch,
                row_max,
                row_argmax,
                row_sum,
                acc,
                spec,
                per,
                BLOCK_KV,
                False,
            )
        # The partial blocks before and after the full ones are in one loop: two would double its code and its
        # registers.
        num_leading_partial = full_start - first
        for i in tl.range(0, num_leading_partial + last - full_end):
            n = tl.where(i < num_leading_partial, first + i, full_end + i - num_leading_partial)
            row_max, row_argmax, row_sum, acc = _key_block_step(
                n,
                q_rows,
                queries,
                keys,
                mask_bases,
                batch,
                row_max,
                row_argmax,
                row_sum,
                acc,
                spec,
                per,
                BLOCK_KV,
                True,
            )
    row = tl.cast(batch, tl.int64)
    rows = (row * spec.H + head) * spec.T + index
    # Assigned without sinks too, since `_store_output` has the parameter; it is read only with sinks.
    sink = sinks
    if spec.HAS_SINKS:
        sink = sinks + (batch // per.SINKS) * spec.H + head
    outputs = (output, lse, max_out, argmax_out)
    _store_output(outputs, rows, sink, head, row, start, row_max, row_argmax, row_sum, acc, spec, BLOCK_Q)


@triton.jit
def _key_block_step(
    n,
    q_rows,
    queries,
    keys,
    mask_bases,
    batch,
    row_max,
    row_argmax,
    row_sum,
    acc,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Updates the running softmax with key tile n.

    Tile of q_rows [Q, BD]; row_max, row_argmax, row_sum [Q]; acc [Q, BV]; scores and weights [Q, K].
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q, _, _, _, _ = q_rows
    k_base, v_base, k_ids, k_positions, bias, token_dropout_keys = keys
    start = n * BLOCK_KV
    token_info = load_key_info(start, batch, k_ids, k_positions, token_dropout_keys, spec, per, BLOCK_KV, MASKED)
    k_index, valid, _, _, _ = token_info
    columns = as_row_vectors(token_info)
    # Scores. Partial blocks read 0 for keys past the end and for padding: memory may hold NaN there.
    k = load_tile(k_base, start, valid, spec.HK * spec.D, spec.D, BLOCK_KV, BD, MASKED)
    # Beyond 128 columns float32 rows may be multiplied in pieces (`spec.COLUMNS_PER_SLICE`), since whole rows do not
    # fit registers.
    if BD > 128:
        k_rows = (k, k_base, start, valid, spec.HK * spec.D)
        products = dot_transposed(q_rows, k_rows, spec.D, spec)
    else:
        products = dot(q, tl.trans(k), spec)
    scores, _ = modify_scores(products, queries, columns, bias, spec)
    if MASKED:
        # Masked scores are replaced, not added to: a product with a padded query may be NaN.
        scores = tl.where(attending_pairs(queries, columns, mask_bases, spec), scores, float("-inf"))
    # FACTOR is positive, so the maximum is taken of unscaled scores and scaled once per row. In the exponents below the
    # factor is part of a multiply-add.
    max_score = tl.max(scores, 1)
    new_max = tl.maximum(row_max, to_log2_scores(max_score, spec))
    if spec.NORMALIZE:
        pass
    else:
        # The first key that has the maximum; equal maxima of an earlier tile may have a later index.
        tile_argmax = tl.min(tl.where(scores == max_score[:, None], k_index[None, :], 0x7FFFFFFF), 1)
        first_argmax = tl.minimum(row_argmax, tile_argmax)
        tile_max = to_log2_scores(max_score, spec)
        row_argmax = tl.where(tile_max > row_max, tile_argmax, tl.where(tile_max < row_max, row_argmax, first_argmax))
    shift = new_max
    if (
        MASKED or spec.BIAS_STRIDES is not None or spec.SCORE_MOD is not None
    ):  # a row may have no key so far: -inf - -inf would be NaN
        shift = minus_inf_to_zero(new_max)
    weights = tl.exp2(to_log2_scores(scores, spec) - shift[:, None])
    # Rescales the previous sums to the new maximum: 0 at a row's first key, whose old maximum is -inf.
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    weights = apply_dropout(weights, queries, columns, spec)  # after the sum: dropout does not change the softmax
    # Products. Values past the end are read as 0 too: their weight of 0 times NaN would be NaN.
    v = load_tile(v_base, start, valid, spec.HK * spec.DV, spec.DV, BLOCK_KV, BV, MASKED)
    # Weights are converted to the values' dtype for the matrix unit; the accumulator and `row_sum` stay float32.
    acc = add_dot(acc * alpha[:, None], weights.to(v.dtype), v, spec)
    return new_max, row_argmax, row_sum, acc


@triton.jit
def _store_output(
    outputs,
    rows,
    sink_address,
    head,
    row,
    start,
    row_max,
    row_argmax,
    row_sum,
    acc,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Adds the sink to the denominator, normalises, and stores. `rows` are offsets in [B, H, T]."""
    output, lse, max_out, argmax_out = outputs
    valid = start + tl.arange(0, BLOCK_Q) < spec.T
    # Without a sink, a row that attends to nothing has base 0 and denominator 0: output 0, lse -inf.
    base = minus_inf_to_zero(row_max)
    factor = tl.full([BLOCK_Q], 1.0, tl.float32)
    if spec.HAS_SINKS:
        # The sink may exceed every score, so it joins the maximum as well. It has no value: the accumulator is only
        # rescaled.
        sink = tl.load(sink_address) * LOG2E
        base = minus_inf_to_zero(tl.maximum(row_max, sink))
        factor = tl.exp2(row_max - base)
        row_sum = row_sum * factor + tl.exp2(sink - base)
    positive_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    row_lse = tl.where(row_sum > 0.0, log2_to_log(tl.log2(positive_sum) + base, base, spec), float("-inf"))
    tl.store(lse + rows, row_lse, mask=valid)
    if spec.NORMALIZE:
        # One factor per row: rescaling by the sink, dropout's scale and the denominator.
        acc = acc * (factor * spec.KEPT_WEIGHT_SCALE / positive_sum)[:, None]
    else:
        # Not normalised: the output is relative to the maximum, which is returned too. Its gradient goes to the key at
        # argmax.
        acc = acc * spec.KEPT_WEIGHT_SCALE
        tl.store(max_out + rows, log2_to_log(minus_inf_to_zero(row_max), row_max, spec), mask=valid)
        tl.store(argmax_out + rows, row_argmax, mask=valid)
    BV: tl.constexpr = spec.BV
    out_base = output + (row * spec.T * spec.H + head) * spec.DV
    store_tile(out_base, start, acc, spec.H * spec.DV, spec.T, spec.DV, BLOCK_Q, BV)
