"""Attention of single query rows over codes: split-KV, with codebooks looked up in registers' reach.

    program (row, KV head, split):   tiles of keys of the split, one after the other

    bytes of codes  -> join the codes of a byte -> codes [keys, D] -> load codebook[code] -> tile of the product
    |k| q_rotated codebook[code]^T + |r| q_projected signs^T = scores;   (|v| p) codebook[code] = values

Norms are factors of columns of the scores and of the weights, so that no element of a tile is multiplied. Programs of a
row and a head leave unnormalised partial softmaxes, which the caller merges.

Sources: Zandieh et al. 2025, arXiv:2504.19874 (TurboQuant); Dao et al. 2023 (Flash-Decoding).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, add_dot, batch_row_address, convert_to_dtype, dot, minus_inf_to_zero, tanh


@triton.jit
def spread_codes(words, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns codes [ROWS, COLUMNS] of words [ROWS, COLUMNS / n] with n codes each, the first in the lowest bits.

    `tl.join` puts two arrays side by side along a new last axis: the last join is the lowest bit of a code's number.
    """
    MASK: tl.constexpr = 2**BITS - 1
    if BITS == 4:
        codes = tl.join(words & MASK, (words >> 4) & MASK)
    elif BITS == 2:
        codes = tl.join(tl.join(words & MASK, (words >> 4) & MASK), tl.join((words >> 2) & MASK, (words >> 6) & MASK))
    else:
        even = tl.join(
            tl.join(words & MASK, (words >> (4 * BITS)) & MASK),
            tl.join((words >> (2 * BITS)) & MASK, (words >> (6 * BITS)) & MASK),
        )
        odd = tl.join(
            tl.join((words >> BITS) & MASK, (words >> (5 * BITS)) & MASK),
            tl.join((words >> (3 * BITS)) & MASK, (words >> (7 * BITS)) & MASK),
        )
        codes = tl.join(even, odd)
    return tl.reshape(codes, [ROWS, COLUMNS])


@triton.jit
def load_codes(pages, slot, valid, BITS: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Loads the codes [BLOCK_KV, COLUMNS] of slots; 0 where `valid` is false."""
    ROW_BYTES: tl.constexpr = COLUMNS * BITS // 8
    rows = pages + slot[:, None] * ROW_BYTES
    if BITS == 3:
        # Eight codes are three bytes.
        group = tl.arange(0, COLUMNS // 8)
        at = rows + group[None, :] * 3
        words = tl.load(at, mask=valid[:, None], other=0).to(tl.int32)
        words = words | (tl.load(at + 1, mask=valid[:, None], other=0).to(tl.int32) << 8)
        words = words | (tl.load(at + 2, mask=valid[:, None], other=0).to(tl.int32) << 16)
    else:
        group = tl.arange(0, ROW_BYTES)
        words = tl.load(rows + group[None, :], mask=valid[:, None], other=0).to(tl.int32)
    return spread_codes(words, BITS, spec.BLOCK_KV, COLUMNS)


@triton.jit
def load_code_values(pages, codebook, slot, valid, BITS: tl.constexpr, LEVELS: tl.constexpr, spec: tl.constexpr):
    """Loads what the codes [BLOCK_KV, D] of slots stand for, in the dtype of the products."""
    codes = load_codes(pages, slot, valid, BITS, spec.D, spec)
    if LEVELS < 2**BITS:
        codes = tl.minimum(codes, LEVELS - 1)
    DTYPE: tl.constexpr = spec.DOT_DTYPE  # Triton 3.6 takes no field of a string as an argument
    return convert_to_dtype(tl.load(codebook + codes), DTYPE)


@triton.jit
def code_attention_kernel(
    query,
    key_codes,
    key_signs,
    value_codes,
    key_norms,
    value_norms,
    key_codebook,
    value_codebook,
    block_tables,
    key_ranges,
    partial_accs,
    partial_row_maxima,
    partial_row_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the partial softmax of one query row, KV head and split of the row's keys."""
    M: tl.constexpr = spec.M
    D: tl.constexpr = spec.D
    Q: tl.constexpr = spec.Q
    BLOCK_KV: tl.constexpr = spec.BLOCK_KV
    SLOTS: tl.constexpr = spec.NUM_PAGES * spec.PAGE_SIZE * spec.HK
    DTYPE: tl.constexpr = spec.DOT_DTYPE
    program = tl.program_id(0)
    split = program % spec.NUM_SPLITS
    head = program // spec.NUM_SPLITS % spec.HK
    row = program // (spec.NUM_SPLITS * spec.HK) % spec.T
    batch = tl.cast(program // (spec.NUM_SPLITS * spec.HK * spec.T), tl.int64)
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.HK * spec.G * (D + Q))
    key_codes = batch_row_address(key_codes, batch, per.KEY_CODES, SLOTS * (D * spec.KEY_BITS // 8))
    value_codes = batch_row_address(value_codes, batch, per.VALUE_CODES, SLOTS * (D * spec.VALUE_BITS // 8))
    key_norms = batch_row_address(key_norms, batch, per.KEY_NORMS, SLOTS * 2)
    value_norms = batch_row_address(value_norms, batch, per.VALUE_NORMS, SLOTS)
    key_codebook = batch_row_address(key_codebook, batch, per.KEY_CODEBOOK, spec.KEY_LEVELS)
    value_codebook = batch_row_address(value_codebook, batch, per.VALUE_CODEBOOK, spec.VALUE_LEVELS)
    block_tables = batch_row_address(
        block_tables, batch, per.BLOCK_TABLES, spec.NUM_SEQUENCES * spec.PAGES_PER_SEQUENCE
    )
    key_ranges = batch_row_address(key_ranges, batch, per.KEY_RANGES, spec.T * 3)
    if Q > 0:
        key_signs = batch_row_address(key_signs, batch, per.KEY_SIGNS, SLOTS * (Q // 8))
    sequence = tl.load(key_ranges + row * 3)
    low, high = tl.load(key_ranges + row * 3 + 1), tl.load(key_ranges + row * 3 + 2)
    # All query heads of a KV head are rows of one tile; padding rows are 0.
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    query_rows = query + ((tl.cast(row, tl.int64) * spec.HK + head) * spec.G + m[:, None]) * (D + Q)
    in_group = (m < spec.G)[:, None]
    q = convert_to_dtype(tl.load(query_rows + d[None, :], mask=in_group & (d < D)[None, :], other=0.0), DTYPE)
    if Q > 0:
        c = tl.arange(0, Q)
        q_projected = tl.load(query_rows + (D + c)[None, :], mask=in_group & (c < Q)[None, :], other=0.0)
        q_projected = convert_to_dtype(q_projected, DTYPE)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    first_tile = low // BLOCK_KV
    num_tiles = tl.where(high > low, (high + BLOCK_KV - 1) // BLOCK_KV - first_tile, 0)
    tiles_per_split = (num_tiles + spec.NUM_SPLITS - 1) // spec.NUM_SPLITS
    begin = first_tile + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, first_tile + num_tiles)
    for tile in tl.range(begin, end):
        k = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        page_in_sequence = k // spec.PAGE_SIZE
        valid = (k >= low) & (k < high) & (page_in_sequence < spec.PAGES_PER_SEQUENCE)
        page = tl.load(block_tables + sequence * spec.PAGES_PER_SEQUENCE + page_in_sequence, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < spec.NUM_PAGES)
        # 64 bits: a cache may have more than 2 ** 31 bytes.
        slot = tl.cast(tl.where(valid, page, 0), tl.int64) * spec.PAGE_SIZE + k % spec.PAGE_SIZE
        slot = slot * spec.HK + head
        keys = load_code_values(key_codes, key_codebook, slot, valid, spec.KEY_BITS, spec.KEY_LEVELS, spec)
        norms = tl.load(key_norms + slot * 2, mask=valid, other=0.0).to(tl.float32)
        scores = dot(q, tl.trans(keys), spec) * norms[None, :]
        if Q > 0:
            signs = load_codes(key_signs, slot, valid, 1, Q, spec)
            signs = convert_to_dtype((2 * signs - 1).to(tl.float32), DTYPE)
            residual_norms = tl.load(key_norms + slot * 2 + 1, mask=valid, other=0.0).to(tl.float32)
            scores += dot(q_projected, tl.trans(signs), spec) * residual_norms[None, :]
        scores *= spec.SCORE_SCALE
        if spec.SOFT_CAP is not None:
            scores = spec.SOFT_CAP * tanh(scores * (1.0 / spec.SOFT_CAP), False)
        # `m < M` is always true; it broadcasts the row of keys to a tile.
        scores = tl.where(valid[None, :] & (m < M)[:, None], scores * LOG2E, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = minus_inf_to_zero(new_max)
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        values = load_code_values(value_codes, value_codebook, slot, valid, spec.VALUE_BITS, spec.VALUE_LEVELS, spec)
        weights = p * tl.load(value_norms + slot, mask=valid, other=0.0).to(tl.float32)[None, :]
        acc = add_dot(acc * alpha[:, None], convert_to_dtype(weights, DTYPE), values, spec)
        row_max = new_max
    partial = ((batch * spec.T + row) * spec.HK + head) * spec.NUM_SPLITS + split
    at = partial * spec.G + m
    tl.store(partial_row_maxima + at, row_max, mask=m < spec.G)
    tl.store(partial_row_sums + at, row_sum, mask=m < spec.G)
    tl.store(partial_accs + at[:, None] * D + d[None, :], acc, mask=in_group & (d < D)[None, :])
