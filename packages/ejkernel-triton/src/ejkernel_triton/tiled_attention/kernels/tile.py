"""Device helpers for one tile of scores: its queries and keys, its scores, its masks, and dropout.

The queries and keys of a tile are each described by a tuple of vectors, the tile's *rows* or *columns*:

    (index, valid, segment id, position, dropout key)      valid: in bounds, and not padding

Everything elementwise broadcasts, so that a tile may have queries along either axis: `as_column_vectors` and
`as_row_vectors` turn a description into vectors [n, 1] and [1, n].

`block_lists` says which tiles a program computes (see `plan`). Full blocks use a loop without masks, partial blocks one
with masks.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2, bounds_mask, load_vector, round_bfloat16, tanh
from ejkernel_triton.tiled_attention import spec as tiled_spec

LOWEST_LOG2_SCORE = tl.constexpr(tiled_spec.LOWEST_LOG2_SCORE)
LOWEST_FLOAT32 = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32


@triton.jit
def load_query_info(
    start,
    batch,
    head,
    ids,
    positions,
    token_dropout_keys,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Describes the queries `start` to `start + BLOCK`; all are in bounds unless MASKED."""
    index = start + tl.arange(0, BLOCK)
    valid = bounds_mask(index, spec.T, BLOCK)
    # Placeholders: the index is the position unless the call has positions; absent ids and dropout keys are not read.
    id = index
    position = index
    token_dropout_key = index
    if spec.HAS_DROPOUT:
        row = tl.cast(batch // per.DROPOUT_ROW_KEYS, tl.int64) * spec.H + head
        token_dropout_key = load_vector(token_dropout_keys + row * spec.T, index, valid, MASKED)
    if spec.HAS_Q_POSITIONS:
        position = tl.load(positions + (batch // per.Q_POSITIONS) * spec.T + index, mask=valid, other=0)
    if spec.HAS_SEGMENTS:
        id = tl.load(ids + tl.cast(batch // per.Q_IDS, tl.int64) * spec.T + index, mask=valid, other=-1)
        valid = valid & (id >= 0)
        # Padding is -1 here and -2 among keys, so equal ids imply that neither is padding.
        id = tl.where(valid, id, -1)
    return index, valid, id, position, token_dropout_key


@triton.jit
def load_key_info(
    start,
    batch,
    ids,
    positions,
    token_dropout_keys,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Describes the keys `start` to `start + BLOCK`; all are in bounds unless MASKED."""
    index = start + tl.arange(0, BLOCK)
    valid = bounds_mask(index, spec.S, BLOCK)
    id = index
    position = index
    token_dropout_key = index
    if spec.HAS_DROPOUT:
        token_dropout_key = load_vector(
            token_dropout_keys + (batch // per.DROPOUT_COLUMN_KEYS) * spec.S, index, valid, MASKED
        )
    if spec.HAS_K_POSITIONS:
        position = tl.load(positions + (batch // per.K_POSITIONS) * spec.S + index, mask=valid, other=0)
    if spec.HAS_SEGMENTS:
        id = tl.load(ids + tl.cast(batch // per.K_IDS, tl.int64) * spec.S + index, mask=valid, other=-1)
        valid = valid & (id >= 0)
        id = tl.where(valid, id, -2)  # differs from every query's id, padding included
    return index, valid, id, position, token_dropout_key


@triton.jit
def as_column_vectors(token_info):
    """Returns a description along the first axis of a tile, [n, 1] each."""
    index, valid, id, position, token_dropout_key = token_info
    return index[:, None], valid[:, None], id[:, None], position[:, None], token_dropout_key[:, None]


@triton.jit
def as_row_vectors(token_info):
    """Returns a description along the second axis of a tile, [1, n] each."""
    index, valid, id, position, token_dropout_key = token_info
    return index[None, :], valid[None, :], id[None, :], position[None, :], token_dropout_key[None, :]


@triton.jit
def attending_pairs(queries, keys, mask_bases, spec: tl.constexpr):
    """Returns which pairs attend; `mask_bases` has the addresses of the mask of this batch row and head, and of this
    tile's mask.
    """
    q, q_valid, q_id, q_position, _ = queries
    k, k_valid, k_id, k_position, _ = keys
    mask, tile_mask = mask_bases
    pairs = q_valid & k_valid
    if spec.HAS_SEGMENTS:  # ids of padding differ
        pairs = q_id == k_id
    # The band compares positions, which are indices if the call has none.
    if spec.WINDOW_LEFT is not None:
        pairs = pairs & (k_position >= q_position - spec.WINDOW_LEFT)
    if spec.WINDOW_RIGHT is not None:
        pairs = pairs & (k_position <= q_position + spec.WINDOW_RIGHT)
    if spec.MASK_MOD is not None:
        words, batch, head, first_query, first_key = mask
        pairs = pairs & spec.MASK_MOD(batch, head, q + first_query, k + first_key, words, spec.FAST_TANH)
    if spec.PATTERN_TILE_SHAPE is not None:
        # No bounds checks: a tile mask is as large as a tile, also past the ends of queries and keys.
        pairs = pairs & (tl.load(tile_mask + (q * spec.PATTERN_TILE_SHAPE[1] + k)) != 0)
    if spec.MASK_STRIDES is not None:
        # Pairs that are already masked are not read: fewer bytes, and nothing out of bounds.
        at = mask + offset_of_pair(q, k, spec.MASK_STRIDES[2], spec.MASK_STRIDES[3], spec)
        pairs = pairs & (tl.load(at, mask=pairs, other=0) != 0)
    return pairs


@triton.jit
def offset_of_pair(q, k, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, spec: tl.constexpr):
    """Returns the offset of a pair in a head's bias or mask; in 64 bits, which take registers, only if necessary."""
    if spec.T * spec.S < 2**31:
        return q * Q_STRIDE + k * K_STRIDE
    else:
        return tl.cast(q, tl.int64) * Q_STRIDE + k * K_STRIDE


@triton.jit
def pair_bases(bias, mask, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Returns the addresses of a head and batch row in the bias and in the mask; the pointers themselves without
    them.

    With `score_mod` or `mask_mod` there is neither: both are what the functions read. These are the words of their
    arrays, from the operand `mask`; the batch row and the head; and the index of the first query and of the first key.
    """
    if spec.FUNCTION_WORDS is not None:
        words = mask + tl.cast(batch // per.MASK, tl.int64) * spec.FUNCTION_WORDS
        # Indices in the whole call, of which this one may be a shard; under vmap a row's index counts in its own call.
        row = batch % spec.BATCH + tl.load(words)
        bias = (words, row, head + tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))
        mask = bias
    if spec.BIAS_STRIDES is not None:
        bias = (
            bias
            + tl.cast(batch // per.BIAS, tl.int64) * spec.BIAS_STRIDES[0]
            + tl.cast(head, tl.int64) * spec.BIAS_STRIDES[1]
        )
    if spec.MASK_STRIDES is not None:
        mask = (
            mask
            + tl.cast(batch // per.MASK, tl.int64) * spec.MASK_STRIDES[0]
            + tl.cast(head, tl.int64) * spec.MASK_STRIDES[1]
        )
    return bias, mask


@triton.jit
def kv_bases(key, value, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Returns the addresses of a KV head and batch row in the keys and in the values."""
    k = key + (tl.cast(batch // per.KEY, tl.int64) * spec.S * spec.HK + head) * spec.D
    v = value + (tl.cast(batch // per.VALUE, tl.int64) * spec.S * spec.HK + head) * spec.DV
    return k, v


@triton.jit
def consecutive_block_bounds(block_lists, batch, tile, per: tl.constexpr, NUM_TILES: tl.constexpr):
    """Returns the blocks of a tile without a pattern: first, full_start, full_end, last; see `plan`."""
    row = block_lists + ((batch // per.BLOCK_LISTS) * NUM_TILES + tile) * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def load_block_list(
    block_lists, batch, head, tile, LIST_SHAPE: tl.constexpr, per: tl.constexpr, NUM_TILES: tl.constexpr
):
    """Returns the blocks of a tile with a pattern: the number of full ones, of all, and the list for `listed_block`."""
    HEADS: tl.constexpr = LIST_SHAPE[0]
    row = batch // per.BLOCK_LISTS
    if HEADS > 1:
        row = row * HEADS + head
    at = block_lists + (tl.cast(row, tl.int64) * NUM_TILES + tile) * LIST_SHAPE[1]
    return tl.load(at), tl.load(at + 1), at + 2


@triton.jit
def listed_block(blocks, i):
    """Returns block `i` of a list."""
    return tl.load(blocks + 2 * i)


@triton.jit
def tile_mask_id(blocks, i):
    """Returns the id of the tile mask of block `i` of a list."""
    return tl.load(blocks + 2 * i + 1)


@triton.jit
def tile_mask_base(tile_masks, id, q_start, k_start, spec: tl.constexpr):
    """Returns the address of a tile's mask, shifted so that `attending_pairs` can index it by the pair's indices in the
    whole call; `tile_masks` itself without a pattern.

    Those indices are in registers anyway.
    """
    if spec.PATTERN_TILE_SHAPE is None:
        return tile_masks
    else:
        SIZE: tl.constexpr = spec.PATTERN_TILE_SHAPE[0] * spec.PATTERN_TILE_SHAPE[1]
        return tile_masks + (tl.cast(id, tl.int64) * SIZE - q_start * spec.PATTERN_TILE_SHAPE[1] - k_start)


@triton.jit
def modify_scores(scores, queries, keys, bias, spec: tl.constexpr):
    """Converts products of queries and keys to scores, which times FACTOR are in log2; also returns the derivative of
    the soft cap and `score_mod`.
    """
    cap_slope = 1.0
    if spec.SCORES_ARE_ONLY_SCALED:
        return scores, cap_slope
    else:
        # The order that every backend keeps: scale, bias, soft cap, `score_mod`, rounding; the mask comes after.
        scores = scores * spec.SCALE
        if spec.BIAS_STRIDES is not None:
            q, q_valid, _, _, _ = queries
            k, k_valid, _, _, _ = keys
            at = bias + offset_of_pair(q, k, spec.BIAS_STRIDES[2], spec.BIAS_STRIDES[3], spec)
            scores += tl.load(at, mask=q_valid & k_valid, other=0.0).to(tl.float32)
        if spec.SOFT_CAP is not None:
            tanh_scores = tanh(scores * (1.0 / spec.SOFT_CAP), spec.FAST_TANH)
            # The derivative of the cap, which the backward pass needs, from the same tanh.
            cap_slope = 1.0 - tanh_scores * tanh_scores
            capped = tanh_scores * spec.SOFT_CAP
            # tanh(-inf) is -1, so pairs that a bias of -inf masks must be masked again.
            scores = tl.where(scores == float("-inf"), scores, capped) if spec.BIAS_STRIDES is not None else capped
        if spec.SCORE_MOD is not None:
            q, _, _, _, _ = queries
            k, _, _, _, _ = keys
            words, batch, head, first_query, first_key = bias
            scores, slope = spec.SCORE_MOD(scores, batch, head, q + first_query, k + first_key, words, spec.FAST_TANH)
            # The soft cap comes before `score_mod`: the derivative by an element that it reads has no part of it.
            cap_slope = slope if spec.DIFFERENTIATES_LOAD else cap_slope * slope
        if spec.SCORE_ROUNDING_DTYPE == "bfloat16":
            scores = round_bfloat16(scores)
        if spec.SCORE_ROUNDING_DTYPE == "float16":
            scores = scores.to(tl.float16).to(tl.float32)
        return scores, cap_slope


@triton.jit
def to_log2_scores(scores, spec: tl.constexpr):
    """Returns scores times log2(e), for exp2, for which GPUs have an instruction; -inf is kept."""
    if spec.SCORES_MAY_BE_MINUS_INF:
        # A bias may be the lowest finite float32, which times log2(e) is -inf and would count as masked.
        return tl.where(scores == float("-inf"), scores, tl.maximum(scores * spec.LOG2_SCORE_FACTOR, LOWEST_LOG2_SCORE))
    else:
        return scores * spec.LOG2_SCORE_FACTOR


@triton.jit
def apply_dropout(weights, queries, keys, spec: tl.constexpr):
    """Returns the weights with dropped ones set to 0; the others are not scaled up."""
    if spec.HAS_DROPOUT:
        _, _, _, _, row = queries
        _, _, _, _, column = keys
        # Products of uint32 wrap. One multiplication decides a pair, in the same way in every tiling and in both
        # passes.
        return tl.where(row * column >= spec.DROPOUT_THRESHOLD, weights, 0.0)
    else:
        return weights


@triton.jit
def log2_to_log(log2_value, base, spec: tl.constexpr):
    """Converts log2 to log; the lowest finite float32 if a bias masks all of its row."""
    if spec.SCORES_MAY_BE_MINUS_INF:
        return tl.where(base == LOWEST_LOG2_SCORE, LOWEST_FLOAT32, log2_value * LN2)
    else:
        return log2_value * LN2
