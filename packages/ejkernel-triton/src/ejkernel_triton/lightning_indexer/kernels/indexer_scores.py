"""Computes the scores of a chunk of queries: a tile of keys times the heads of BLOCK_Q queries, summed over the heads.

    q [BLOCK_Q x heads, D] (shared memory)       +-------------------- per tile of keys --------------------+
    w [BLOCK_Q x heads]    (registers)       --> | K [BLOCK_KV, D] --> a = K q^T   [BLOCK_KV, BLOCK_Q x heads] |
                                                 |   --> sum over heads of w max(0, a)  --> scores of a chunk  |
                                                 +-------------------------------------------------------------+

Keys are the rows of a product and heads its columns: a thread holds a quarter of the columns of a few rows, so the sum
over heads is within a thread but for two exchanges. Scores are 1/heads of the products, and only they are stored.

Source: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address, bounds_mask, dot, load_tile
from ejkernel_triton.lightning_indexer.kernels.ordered_integers import integers_in_order


@triton.jit
def indexer_scores_kernel(
    query,
    key,
    weights,
    key_starts,
    key_ends,
    first_query,
    key_scales,
    ordered_scores,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    KEYS_PER_PROGRAM: tl.constexpr,
):
    """Computes the scores of BLOCK_Q queries with up to KEYS_PER_PROGRAM keys: [CHUNK, S] int32, ordered as numbers.

    Tiles of keys that none of the queries may select are left out; other keys have scores also where a query may not
    select them.
    """
    QUERY_TILES: tl.constexpr = (spec.CHUNK + BLOCK_Q - 1) // BLOCK_Q
    KEY_SPLITS: tl.constexpr = (spec.S + KEYS_PER_PROGRAM - 1) // KEYS_PER_PROGRAM
    # Programs that run together share keys, which stay in L2.
    program = tl.program_id(0)
    chunk_row = (program % QUERY_TILES) * BLOCK_Q
    split_start = ((program // QUERY_TILES) % KEY_SPLITS) * KEYS_PER_PROGRAM
    batch = tl.cast(program // (QUERY_TILES * KEY_SPLITS), tl.int64)
    first_token = tl.load(batch_row_address(first_query, batch, per.FIRST_QUERY, 1)) + chunk_row
    n = tl.arange(0, BLOCK_Q)
    is_query = (chunk_row + n < spec.CHUNK) & (first_token + n < spec.T)
    key_starts = batch_row_address(key_starts, batch, per.KEY_STARTS, spec.T)
    key_ends = batch_row_address(key_ends, batch, per.KEY_ENDS, spec.T)
    starts = tl.load(key_starts + first_token + n, mask=is_query, other=spec.S)
    ends = tl.load(key_ends + first_token + n, mask=is_query, other=0)
    has_keys = starts < ends
    begin = tl.maximum(tl.min(tl.where(has_keys, starts, spec.S), 0), split_start)
    end = tl.minimum(tl.max(tl.where(has_keys, ends, 0), 0), split_start + KEYS_PER_PROGRAM)
    if begin < end:
        query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
        key = batch_row_address(key, batch, per.KEY, spec.S * spec.D)
        weights = batch_row_address(weights, batch, per.WEIGHTS, spec.T * spec.H)
        if spec.HAS_KEY_SCALES:
            key_scales = batch_row_address(key_scales, batch, per.KEY_SCALES, spec.S)
        ordered_scores += (batch * spec.CHUNK + chunk_row) * spec.S
        q, w = _load_queries(query, weights, first_token, chunk_row, spec, BLOCK_Q)
        for start in tl.range(begin // BLOCK_KV * BLOCK_KV, end, BLOCK_KV):
            index = start + tl.arange(0, BLOCK_KV)
            in_keys = bounds_mask(index, spec.S, BLOCK_KV)
            k = load_tile(key, start, in_keys, spec.D, spec.D, BLOCK_KV, spec.BD, spec.S % BLOCK_KV != 0)
            products = dot(k, tl.trans(q), spec)
            if spec.HAS_KEY_SCALES:
                products *= tl.load(key_scales + index, mask=in_keys, other=0.0)[:, None]
            if spec.RECTIFY:
                # A product that is NaN makes the score NaN.
                products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            by_head = tl.reshape(products * w[None, :], [BLOCK_KV, BLOCK_Q, spec.BH])
            scores = integers_in_order(tl.sum(by_head, 2))
            at = ordered_scores + n[None, :] * tl.cast(spec.S, tl.int64) + index[:, None]
            tl.store(at, scores, mask=(chunk_row + n < spec.CHUNK)[None, :] & in_keys[:, None])


@triton.jit
def _load_queries(query, weights, first_token, chunk_row, spec: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Loads [BLOCK_Q x heads, D] and the weights of these rows times the factor on products; 0 for padding."""
    ROWS: tl.constexpr = BLOCK_Q * spec.BH
    row = tl.arange(0, ROWS)
    n, head = row // spec.BH, row % spec.BH
    is_row = (chunk_row + n < spec.CHUNK) & (first_token + n < spec.T) & (head < spec.H)
    at = tl.cast(first_token + n, tl.int64) * spec.H + head
    d = tl.arange(0, spec.BD)
    q = tl.load(query + at[:, None] * spec.D + d[None, :], mask=is_row[:, None] & (d < spec.D)[None, :], other=0.0)
    if spec.NEGATE_QUERIES:
        q = (-q.to(tl.float32)).to(q.dtype)  # the interpreter cannot negate bfloat16
    w = tl.load(weights + at, mask=is_row, other=0.0).to(tl.float32)
    return q, w * spec.WEIGHT_FACTOR
