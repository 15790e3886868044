# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The backward kernels, by recomputation of the scores: one for queries, one for keys and values, one that merges.

    queries_kernel: q, do, lse, delta in registers          keys_kernel: K, V of one block in registers
    per key tile of every listed block:                      per tile of queries in the block's list, gathered:
      K tile --> s = q K^T --> p = exp2(s - lse), masked       q tile  --> s^T = K q^T --> p^T, masked
      V tile --> dp = do V^T,  ds = p (dp - delta)             do tile --> dv += p^T do
                 dq += ds K                                                dp^T = V do^T - delta
                                                                           dk += (p^T dp^T) q

Every query may list the first block, so long lists are split: a program of keys_kernel loops over one part of one list.
Where a list has several parts, each stores its float32 accumulators in a slot, and `merge_kernel` adds the slots up in
their order. No atomic additions, so every run gives the same bits.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.selected_attention.selected_tile import (
    at_batch,
    attending,
    block_start,
    load_heads,
    load_keys,
    load_numbers,
    query_position,
    slots_in_use,
    store_heads,
)

# Fields of a part of a list.
BLOCK = tl.constexpr(0)
FIRST_ENTRY = tl.constexpr(1)
END_ENTRY = tl.constexpr(2)
SLOT = tl.constexpr(3)
PART_FIELDS = tl.constexpr(4)


@triton.jit
def queries_kernel(
    query,
    key,
    value,
    listed,
    starts,
    q_positions,
    q_ids,
    k_ids,
    cotangent,
    shift,
    delta,
    dquery,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """The gradient of one query, for all query heads of one KV head."""
    program = tl.program_id(0)
    token = program % spec.T
    head = (program // spec.T) % spec.HK
    batch = program // (spec.T * spec.HK)
    query = at_batch(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    key = at_batch(key, batch, per.KEY, spec.S * spec.HK * spec.D) + head * spec.D
    value = at_batch(value, batch, per.VALUE, spec.S * spec.HK * spec.DV) + head * spec.DV
    cotangent = at_batch(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
    shift = at_batch(shift, batch, per.SHIFT, spec.T * spec.H)
    delta = at_batch(delta, batch, per.DELTA, spec.T * spec.H)
    listed = at_batch(listed, batch, per.LISTED, spec.T * spec.HK * spec.SLOTS)
    listed += tl.cast(token * spec.HK + head, tl.int64) * spec.SLOTS
    if spec.STARTS:
        starts = at_batch(starts, batch, per.STARTS, spec.M)
    if spec.POSITIONS:
        q_positions = at_batch(q_positions, batch, per.Q_POSITIONS, spec.T)
    count = slots_in_use(listed, spec)
    q_id = 0
    if spec.SEGMENTS:
        k_ids = at_batch(k_ids, batch, per.K_IDS, spec.S)
        q_id = tl.load(at_batch(q_ids, batch, per.Q_IDS, spec.T) + token)
        # Padding attends to nothing: the loop has no steps, and the gradient stored is 0.
        count = tl.where(q_id >= 0, count, 0)
    q_position = query_position(q_positions, token, spec)
    TILES: tl.constexpr = (spec.SIZE + BLOCK_KV - 1) // BLOCK_KV
    BG: tl.constexpr = spec.BG
    BD: tl.constexpr = spec.BD
    # The program's query, with all heads of the KV head, stays in registers.
    q = load_heads(query, token, head, spec.D, BD, spec)
    do = load_heads(cotangent, token, head, spec.DV, spec.BV, spec)
    lse = load_numbers(shift, token, head, spec)
    delta_row = load_numbers(delta, token, head, spec)
    acc = tl.zeros([BG, BD], tl.float32)
    # One loop over the tiles of all listed blocks, as in the forward kernel.
    for i in tl.range(0, count * TILES):
        block = tl.load(listed + i // TILES)
        index = (i % TILES) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        start = block_start(starts, block, spec)
        valid = (index < tl.where(block >= 0, spec.SIZE, 0)) & (start + index < spec.S)
        k = load_keys(key, start, index, valid, spec.D, BD, spec)
        v = load_keys(value, start, index, valid, spec.DV, spec.BV, spec)
        attends = attending(k_ids, start + index, valid, q_position, q_id, spec)
        scores = dot(q, tl.trans(k), spec) * spec.FACTOR
        # Masked weights are replaced after exp2, which may be inf for keys that lse does not count.
        weights = tl.where(attends[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        dscores = weights * (dot(do, tl.trans(v), spec) - delta_row[:, None])
        if spec.SEGMENTS:  # products of other segments' rows may be inf, and 0 x inf is NaN
            dscores = tl.where(attends[None, :], dscores, 0.0)
        # K is an operand of two products, of scores and of dq, with one load.
        acc = add_dot(acc, dscores.to(k.dtype), k, spec)
    dquery += tl.cast(batch, tl.int64) * (spec.T * spec.H * spec.D)
    store_heads(dquery, token, head, acc * spec.SCALE, spec.D, BD, spec)


@triton.jit
def _gather(base, token, group_head, head, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """[ROWS, COLUMNS], each row that of a token and a head of the group; 0 where `valid` is false."""
    d = tl.arange(0, COLUMNS)
    # 64-bit offsets for every row: the tokens of a tile come from a list and may lie anywhere in the array.
    row = tl.cast(token * spec.H + head * spec.G + group_head, tl.int64) * WIDTH
    return tl.load(base + row[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def keys_kernel(
    query,
    key,
    value,
    readers,
    parts,
    starts,
    ends,
    q_positions,
    q_ids,
    k_ids,
    cotangent,
    shift,
    delta,
    dkey,
    dvalue,
    key_sums,
    value_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients of BLOCK_KV keys and values of one block and KV head, over one part of the list of the block's queries.

    A tile has ROWS rows: BLOCK_Q queries times the heads of the group, and what pads. There are PARTS parts, and SUMS
    slots for sums, of every KV head.
    """
    TILES: tl.constexpr = (spec.SIZE + BLOCK_KV - 1) // BLOCK_KV
    program = tl.program_id(0)
    # Programs of one part and other keys of its block run next to each other: they gather the same queries from L2.
    tile = program % TILES
    part = (program // TILES) % PARTS
    head = (program // (TILES * PARTS)) % spec.HK
    batch = program // (TILES * PARTS * spec.HK)
    parts = at_batch(parts, batch, per.PARTS, spec.HK * PARTS * PART_FIELDS) + (head * PARTS + part) * PART_FIELDS
    block = tl.load(parts + BLOCK)
    if block >= 0:  # there may be fewer parts than there is room for
        first_entry, end, slot = tl.load(parts + FIRST_ENTRY), tl.load(parts + END_ENTRY), tl.load(parts + SLOT)
        query = at_batch(query, batch, per.QUERY, spec.T * spec.H * spec.D)
        key = at_batch(key, batch, per.KEY, spec.S * spec.HK * spec.D) + head * spec.D
        value = at_batch(value, batch, per.VALUE, spec.S * spec.HK * spec.DV) + head * spec.DV
        cotangent = at_batch(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
        shift = at_batch(shift, batch, per.SHIFT, spec.T * spec.H)
        delta = at_batch(delta, batch, per.DELTA, spec.T * spec.H)
        readers = at_batch(readers, batch, per.READERS, spec.HK * spec.T * spec.SLOTS)
        readers += tl.cast(head, tl.int64) * (spec.T * spec.SLOTS)
        if spec.STARTS:
            starts = at_batch(starts, batch, per.STARTS, spec.M)
        if spec.POSITIONS:
            q_positions = at_batch(q_positions, batch, per.Q_POSITIONS, spec.T)
        BD: tl.constexpr = spec.BD
        BV: tl.constexpr = spec.BV
        start = block_start(starts, block, spec)
        index = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        valid = (index < spec.SIZE) & (start + index < spec.S)
        if spec.SEGMENTS:
            q_ids = at_batch(q_ids, batch, per.Q_IDS, spec.T)
            k_id = tl.load(at_batch(k_ids, batch, per.K_IDS, spec.S) + start + index, mask=valid, other=-1)
        # K and V of the block stay in registers; queries are streamed.
        k = load_keys(key, start, index, valid, spec.D, BD, spec)
        v = load_keys(value, start, index, valid, spec.DV, BV, spec)
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        row = tl.arange(0, ROWS)
        # A row is a query and a head, without gaps between queries: only the tile's end pads.
        group_head = row % spec.G
        for at in tl.range(first_entry, end, BLOCK_Q):
            entry = at + row // spec.G
            listed = (row < BLOCK_Q * spec.G) & (entry < end)
            # Queries of a list lie anywhere, so q, do, lse and delta are gathered row by row; rows that pad read 0.
            token = tl.load(readers + entry, mask=listed, other=0)
            q = _gather(query, token, group_head, head, listed, spec.D, BD, spec)
            do = _gather(cotangent, token, group_head, head, listed, spec.DV, BV, spec)
            q_row = token * spec.H + head * spec.G + group_head
            lse = tl.load(shift + q_row, mask=listed, other=0.0)
            delta_row = tl.load(delta + q_row, mask=listed, other=0.0)
            last = token
            if spec.POSITIONS:
                last = tl.load(q_positions + token, mask=listed, other=-1)
            # The list says that the query reads the block; within its own block it still attends only up to its
            # position.
            attends = valid[:, None] & listed[None, :] & ((start + index)[:, None] <= last[None, :])
            if spec.SEGMENTS:
                attends = attends & (k_id[:, None] == tl.load(q_ids + token, mask=listed, other=-1)[None, :])
            scores = dot(k, tl.trans(q), spec) * spec.FACTOR
            # Transposed, [keys, queries]: p^T and ds^T are left operands as they lie in registers.
            weights = tl.where(attends, tl.exp2(scores - lse[None, :]), 0.0)
            dv = add_dot(dv, weights.to(do.dtype), do, spec)
            dscores = weights * (dot(v, tl.trans(do), spec) - delta_row[None, :])
            if spec.SEGMENTS:
                dscores = tl.where(attends, dscores, 0.0)
            dk = add_dot(dk, dscores.to(q.dtype), q, spec)
        dk = dk * spec.SCALE
        # The whole list: this is the gradient. Where sequences are packed, a block may reach into the next sequence,
        # whose own block stores those keys.
        if slot < 0:
            dkey += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.D) + head * spec.D
            dvalue += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.DV) + head * spec.DV
            last_key = tl.load(at_batch(ends, batch, per.ENDS, spec.M) + block)
            _store_keys(dkey, start, index, last_key, dk, spec.D, BD, spec)
            _store_keys(dvalue, start, index, last_key, dv, spec.DV, BV, spec)
        else:
            # One part of several: float32 accumulators, whole tiles without masks, for `merge_kernel`, the next
            # launch.
            sums = (tl.cast(batch * spec.HK + head, tl.int64) * SUMS + slot) * TILES + tile
            _store_sums(key_sums, sums, dk, BLOCK_KV, BD)
            _store_sums(value_sums, sums, dv, BLOCK_KV, BV)


@triton.jit
def _store_keys(base, start, index, end, tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Writes [keys, COLUMNS] to keys `start + index` before `end` of an array [S, HK, WIDTH]."""
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(start, tl.int64) * (spec.HK * WIDTH) + (index[:, None] * (spec.HK * WIDTH) + d[None, :])
    attends = (start + index < end)[:, None] & (d < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=attends)


@triton.jit
def _store_sums(base, q_row, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes [ROWS, COLUMNS] as number `q_row` of an array of such tiles."""
    at = base + q_row * (ROWS * COLUMNS)
    tl.store(at + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], tile)


@triton.jit
def merge_kernel(
    key_sums,
    value_sums,
    merges,
    starts,
    ends,
    dkey_so_far,
    dvalue_so_far,
    dkey,
    dvalue,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Adds up the slots of one block whose list has several parts; `merges` has its first slot and how many there are.

    `dkey` and `dvalue` are `dkey_so_far` and `dvalue_so_far`: the same memory, of which only such blocks are written.
    """
    TILES: tl.constexpr = (spec.SIZE + BLOCK_KV - 1) // BLOCK_KV
    program = tl.program_id(0)
    tile = program % TILES
    block = (program // TILES) % spec.M
    head = (program // (TILES * spec.M)) % spec.HK
    batch = program // (TILES * spec.M * spec.HK)
    merges = at_batch(merges, batch, per.MERGES, spec.HK * spec.M * 2) + (head * spec.M + block) * 2
    first, count = tl.load(merges), tl.load(merges + 1)
    # Blocks with one part are complete in `dkey` and `dvalue` already.
    if count > 0:
        BD: tl.constexpr = spec.BD
        BV: tl.constexpr = spec.BV
        if spec.STARTS:
            starts = at_batch(starts, batch, per.STARTS, spec.M)
        start = block_start(starts, block, spec)
        index = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_at = tl.arange(0, BLOCK_KV)[:, None] * BD + tl.arange(0, BD)[None, :]
        v_at = tl.arange(0, BLOCK_KV)[:, None] * BV + tl.arange(0, BV)[None, :]
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        row = tl.cast(batch // per.KEY_SUMS, tl.int64) * (spec.HK * SUMS) + head * SUMS + first
        # Slots in the order of the list's parts, so every run gives the same bits.
        for slot in tl.range(0, count):
            q_row = (row + slot) * TILES + tile
            dk += tl.load(key_sums + q_row * (BLOCK_KV * BD) + k_at)
            dv += tl.load(value_sums + q_row * (BLOCK_KV * BV) + v_at)
        end = tl.load(at_batch(ends, batch, per.ENDS, spec.M) + block)
        dkey += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.D) + head * spec.D
        dvalue += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.DV) + head * spec.DV
        _store_keys(dkey, start, index, end, dk, spec.D, BD, spec)
        _store_keys(dvalue, start, index, end, dv, spec.DV, BV, spec)
