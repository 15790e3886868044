"""The backward kernels, which recompute the scores: one for queries, one for keys and values, one that merges.

    selected_bwd_dq: q, do, lse, delta in registers          selected_bwd_dkdv: K, V of one block in registers
    per key tile of every listed block:                      per tile of queries in the block's list, gathered:
      K tile --> s = q K^T --> p = exp2(s - lse), masked       q tile  --> s^T = K q^T --> p^T, masked
      V tile --> dp = do V^T,  ds = p (dp - delta)             do tile --> dv += p^T do
                 dq += ds K                                                dp^T = V do^T - delta
                                                                           dk += (p^T dp^T) q

Every query may list the first block, so long lists are split: a program of `selected_bwd_dkdv_kernel` loops over one
split of one list. If a list has several splits, each stores its float32 accumulators in a slot, and
`split_combine_kernel` adds the slots up in order. There are no atomics, so results are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.selected_attention.kernels.tile import batch_row_address, load_block_start, load_keys

# Fields of a split of a list.
BLOCK_FIELD = tl.constexpr(0)
FIRST_ENTRY_FIELD = tl.constexpr(1)
END_ENTRY_FIELD = tl.constexpr(2)
SUM_SLOT_FIELD = tl.constexpr(3)
FIELDS_PER_SPLIT = tl.constexpr(4)


@triton.jit
def _gather_query_rows(
    base, token, group_head, head, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr
):
    """Loads [ROWS, COLUMNS], each row of one token and one head of the group; 0 where `valid` is false."""
    d = tl.arange(0, COLUMNS)
    # 64-bit offsets for every row: the tokens of a tile come from a list and may be far apart.
    row = tl.cast(token * spec.H + head * spec.G + group_head, tl.int64) * WIDTH
    return tl.load(base + row[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def selected_bwd_dkdv_kernel(
    query,
    key,
    value,
    query_lists,
    splits,
    block_starts,
    block_ends,
    q_positions,
    q_segment_ids,
    k_segment_ids,
    cotangent,
    log2_lse,
    delta,
    dkey,
    dvalue,
    partial_dkey,
    partial_dvalue,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SUM_SLOTS: tl.constexpr,
):
    """Computes gradients of BLOCK_KV keys and values of one block and KV head, over one split of the block's list of
    queries.

    A tile has ROWS rows: BLOCK_Q queries times the heads of the group, and padding. There are NUM_SPLITS splits, and
    NUM_SUM_SLOTS slots for sums, per KV head.
    """
    TILES: tl.constexpr = (spec.BLOCK_SIZE + BLOCK_KV - 1) // BLOCK_KV
    program = tl.program_id(0)
    # Consecutive programs have the same split and other keys of its block: they gather the same queries from L2.
    tile = program % TILES
    split = (program // TILES) % NUM_SPLITS
    head = (program // (TILES * NUM_SPLITS)) % spec.HK
    batch = program // (TILES * NUM_SPLITS * spec.HK)
    splits = (
        batch_row_address(splits, batch, per.SPLITS, spec.HK * NUM_SPLITS * FIELDS_PER_SPLIT)
        + (head * NUM_SPLITS + split) * FIELDS_PER_SPLIT
    )
    block = tl.load(splits + BLOCK_FIELD)
    if block >= 0:  # there may be fewer splits than programs
        first_entry, end, slot = (
            tl.load(splits + FIRST_ENTRY_FIELD),
            tl.load(splits + END_ENTRY_FIELD),
            tl.load(splits + SUM_SLOT_FIELD),
        )
        query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
        key = batch_row_address(key, batch, per.KEY, spec.S * spec.HK * spec.D) + head * spec.D
        value = batch_row_address(value, batch, per.VALUE, spec.S * spec.HK * spec.DV) + head * spec.DV
        cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
        log2_lse = batch_row_address(log2_lse, batch, per.LOG2_LSE, spec.T * spec.H)
        delta = batch_row_address(delta, batch, per.DELTA, spec.T * spec.H)
        query_lists = batch_row_address(query_lists, batch, per.QUERY_LISTS, spec.HK * spec.T * spec.NUM_LISTED_BLOCKS)
        query_lists += tl.cast(head, tl.int64) * (spec.T * spec.NUM_LISTED_BLOCKS)
        if spec.HAS_BLOCK_STARTS:
            block_starts = batch_row_address(block_starts, batch, per.BLOCK_STARTS, spec.M)
        if spec.HAS_POSITIONS:
            q_positions = batch_row_address(q_positions, batch, per.Q_POSITIONS, spec.T)
        BD: tl.constexpr = spec.BD
        BV: tl.constexpr = spec.BV
        start = load_block_start(block_starts, block, spec)
        index = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        valid = (index < spec.BLOCK_SIZE) & (start + index < spec.S)
        if spec.HAS_SEGMENTS:
            q_segment_ids = batch_row_address(q_segment_ids, batch, per.Q_SEGMENT_IDS, spec.T)
            k_id = tl.load(
                batch_row_address(k_segment_ids, batch, per.K_SEGMENT_IDS, spec.S) + start + index, mask=valid, other=-1
            )
        # K and V of the block stay in registers; queries are streamed.
        k = load_keys(key, start, index, valid, spec.D, BD, spec)
        v = load_keys(value, start, index, valid, spec.DV, BV, spec)
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        row = tl.arange(0, ROWS)
        # A row is a query and a head, without gaps between queries: only the tile's end is padding.
        group_head = row % spec.G
        for at in tl.range(first_entry, end, BLOCK_Q):
            entry = at + row // spec.G
            in_list = (row < BLOCK_Q * spec.G) & (entry < end)
            # Queries of a list may be anywhere, so q, do, lse and delta are gathered row by row; padding rows are 0.
            token = tl.load(query_lists + entry, mask=in_list, other=0)
            q = _gather_query_rows(query, token, group_head, head, in_list, spec.D, BD, spec)
            do = _gather_query_rows(cotangent, token, group_head, head, in_list, spec.DV, BV, spec)
            q_row = token * spec.H + head * spec.G + group_head
            lse = tl.load(log2_lse + q_row, mask=in_list, other=0.0)
            delta_row = tl.load(delta + q_row, mask=in_list, other=0.0)
            last_visible_key = token
            if spec.HAS_POSITIONS:
                last_visible_key = tl.load(q_positions + token, mask=in_list, other=-1)
            # The list says that the query reads the block; within its own block it attends only up to its position.
            attends = valid[:, None] & in_list[None, :] & ((start + index)[:, None] <= last_visible_key[None, :])
            if spec.HAS_SEGMENTS:
                attends = attends & (k_id[:, None] == tl.load(q_segment_ids + token, mask=in_list, other=-1)[None, :])
            scores = dot(k, tl.trans(q), spec) * spec.LOG2_SCORE_FACTOR
            # Transposed, [keys, queries]: p^T and ds^T are left operands with their layout in registers.
            weights = tl.where(attends, tl.exp2(scores - lse[None, :]), 0.0)
            dv = add_dot(dv, weights.to(do.dtype), do, spec)
            dscores = weights * (dot(v, tl.trans(do), spec) - delta_row[None, :])
            if spec.HAS_SEGMENTS:
                dscores = tl.where(attends, dscores, 0.0)
            dk = add_dot(dk, dscores.to(q.dtype), q, spec)
        dk = dk * spec.SCORE_SCALE
        # With a single split this is the gradient. With packed sequences, a block may extend into the next sequence,
        # whose first block stores those keys.
        if slot < 0:
            dkey += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.D) + head * spec.D
            dvalue += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.DV) + head * spec.DV
            block_end = tl.load(batch_row_address(block_ends, batch, per.BLOCK_ENDS, spec.M) + block)
            _store_key_rows(dkey, start, index, block_end, dk, spec.D, BD, spec)
            _store_key_rows(dvalue, start, index, block_end, dv, spec.DV, BV, spec)
        else:
            # With several splits: stores float32 accumulators, whole tiles without masks, for `split_combine_kernel`,
            # the next launch.
            sum_tile = (tl.cast(batch * spec.HK + head, tl.int64) * NUM_SUM_SLOTS + slot) * TILES + tile
            _store_partial_sum_tile(partial_dkey, sum_tile, dk, BLOCK_KV, BD)
            _store_partial_sum_tile(partial_dvalue, sum_tile, dv, BLOCK_KV, BV)


@triton.jit
def _store_key_rows(base, start, index, end, tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Stores [keys, COLUMNS] to keys `start + index` before `end` of an array [S, HK, WIDTH]."""
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(start, tl.int64) * (spec.HK * WIDTH) + (index[:, None] * (spec.HK * WIDTH) + d[None, :])
    attends = (start + index < end)[:, None] & (d < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=attends)


@triton.jit
def _store_partial_sum_tile(base, tile_index, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores [ROWS, COLUMNS] as tile `tile_index` of an array of such tiles."""
    at = base + tile_index * (ROWS * COLUMNS)
    tl.store(at + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], tile)
