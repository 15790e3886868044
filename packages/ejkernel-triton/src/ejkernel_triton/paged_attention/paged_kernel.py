# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Paged softmax attention: programs with equal shares of all key tiles, and the merging of rows that they share.

                 entry 0 (long)              entry 1   entry 2
    head 0          head 1          ...    h0 h1 ..   h0 h1 ..       key tiles of all entries and KV heads, in a line
    |t t t t t t t|t t t t t t t|  ...  |t t|t t| ... |t|t| ... |
    |-- program 0 --|-- program 1 --|-- program 2 --| ...            equal shares of the line: "stream-K"

A program walks along its share. An item, one head of one entry, that it has all tiles of is finished at once. Of an
item that others have tiles of, it stores the unnormalised accumulator, the row maximum and the denominator in one of
its two slots: slot 2p if its share begins with the item, slot 2p + 1 if it ends with it. `combine_kernel` merges these.

So the time of a call follows from the sum of the lengths and not from the longest, nothing is recompiled when lengths
change, and the workspace holds two tiles a program whatever the lengths.

Sources: Milakov & Gimelshein 2018 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (paged attention); Osama et al.
2023, arXiv:2301.03598 (stream-K); Dao et al. 2023 (Flash-Decoding: merging partial softmaxes).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, at_batch, dot, finite
from ejkernel_triton.paged_attention.paged_tile import (
    CONTEXT,
    FIELDS,
    HIGH,
    LOW,
    POSITION,
    ROW,
    ROWS,
    SEQUENCE,
    START,
    TILES,
    key_operand,
    load_queries,
    load_rows,
    pages_of,
    plan_of,
    scores_of,
    slopes_of,
    store_part,
    store_rows,
    value_operand,
)


@triton.jit
def attend_tile(
    acc,
    tail,
    row_max,
    row_sum,
    q,
    q_rotary,
    keys,
    values,
    tables,
    sequence,
    position,
    context,
    low,
    high,
    head,
    tile,
    slopes,
    qq_bias,
    CUT: tl.constexpr,
    spec: tl.constexpr,
):
    """One step of the online softmax: the keys and values of a tile. Without CUT, every row sees all keys there are."""
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    d = tl.arange(0, spec.BD)
    dv = tl.arange(0, spec.BV)
    r = tl.arange(0, spec.BR)
    k_head = keys + tl.cast(head, tl.int64) * spec.KEY_STRIDES[2]
    v_head = values + tl.cast(head, tl.int64) * spec.VALUE_STRIDES[2] + spec.VALUE_OFFSET
    k = tile * spec.BLOCK_KV + tl.arange(0, spec.BLOCK_KV)
    # Pages outside of the sequence are never read: whatever lies there, NaN too, is not of this call.
    page, there = pages_of(tables, sequence, tile, k, (k >= low) & (k < high), spec)
    k_tile = load_rows(k_head, page, tile, k, there, d, d < spec.D - spec.ROTARY, False, spec)
    products = dot(q, tl.trans(key_operand(k_tile, spec)), spec)
    if spec.ROTARY > 0:
        r_tile = load_rows(v_head, page, tile, k, there, r, r < spec.ROTARY, True, spec)
        products = add_dot(products, q_rotary, tl.trans(key_operand(r_tile, spec)), spec)
    scores = scores_of(products, k, position, context, m, slopes, qq_bias, spec)
    allowed = there[None, :] & (m < spec.M)[:, None]
    if CUT:
        if spec.RIGHT is not None:
            allowed = allowed & (k[None, :] <= (position + m // spec.G + spec.RIGHT)[:, None])
        if spec.LEFT is not None:
            allowed = allowed & (k[None, :] >= (position + m // spec.G - spec.LEFT)[:, None])
    scores = tl.where(allowed, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = finite(new_max)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    if spec.LATENT > 0:
        # The tile in shared memory is both operands: a latent vector is read once.
        v_tile = value_operand(k_tile, spec)
    else:
        v_tile = load_rows(v_head, page, tile, k, there, dv, dv < spec.DV, True, spec)
        v_tile = value_operand(v_tile, spec)
    acc = add_dot(acc * alpha[:, None], p.to(v_tile.dtype), v_tile, spec)
    if spec.TAIL:
        tail = add_dot(tail * alpha[:, None], p.to(v_tile.dtype), value_operand(r_tile, spec), spec)
    return acc, tail, new_max, row_sum


@triton.jit
def attend(
    q,
    q_rotary,
    keys,
    values,
    tables,
    work,
    head,
    first,
    count,
    slopes,
    qq_bias,
    spec: tl.constexpr,
):
    """Online softmax of an item over `count` of its key tiles, from tile `first` on.

    Returns:
        acc [M, BV] and tail [M, BR], unnormalised, row_max [M] and row_sum [M], in powers of two. `tail` holds values
        of rotary columns, if those are values.
    """
    M: tl.constexpr = spec.M
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BR
    sequence, position, context = tl.load(work + SEQUENCE), tl.load(work + POSITION), tl.load(work + CONTEXT)
    low, high = tl.load(work + LOW), tl.load(work + HIGH)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BV], tl.float32)
    tail = tl.zeros([M, BR], tl.float32)
    begin = low // spec.BLOCK_KV + first
    inside, outside = begin, begin
    if spec.CLEAR:
        # Tiles of which every row sees every key come first, without comparisons of rows and keys; the others, at the
        # ends of the range, follow. The order of tiles is free.
        from_all, to_all = low, high
        if spec.LEFT is not None:
            from_all = tl.maximum(low, position + spec.BLOCK_Q - 1 - spec.LEFT)
        if spec.RIGHT is not None:
            to_all = tl.minimum(high, position + spec.RIGHT + 1)
        inside = tl.minimum(tl.maximum((from_all + spec.BLOCK_KV - 1) // spec.BLOCK_KV, begin), begin + count)
        outside = tl.minimum(tl.maximum(to_all // spec.BLOCK_KV, inside), begin + count)
        for tile in tl.range(inside, outside):
            acc, tail, row_max, row_sum = attend_tile(
                acc, tail, row_max, row_sum, q, q_rotary, keys, values, tables, sequence, position, context,
                low, high, head, tile, slopes, qq_bias,
                False, spec,
            )  # fmt: skip
    for number in tl.range(begin, begin + count - (outside - inside)):
        tile = number
        if spec.CLEAR:
            tile = tl.where(number < inside, number, number + (outside - inside))
        acc, tail, row_max, row_sum = attend_tile(
            acc, tail, row_max, row_sum, q, q_rotary, keys, values, tables, sequence, position, context,
            low, high, head, tile, slopes, qq_bias,
            True, spec,
        )  # fmt: skip
    return acc, tail, row_max, row_sum


@triton.jit
def paged_kernel(
    query,
    keys,
    values,
    tables,
    work,
    shares,
    sinks,
    slopes,
    qq_bias,
    output,
    lse,
    parts,
    row_maxima,
    row_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """A program attends the key tiles of its share; see the diagram at the top.

    `work` holds the entries, `shares` the entry and the tile in which each program begins and, last, the tiles of a
    share and of all. Slots of `parts` that no item needs are left as they are.
    """
    program = tl.program_id(0)
    split = program % spec.SPLITS
    batch = tl.cast(program // (spec.SPLITS * spec.PROGRAMS), tl.int64)
    program = program // spec.SPLITS % spec.PROGRAMS
    query = at_batch(query, batch, per.QUERY, spec.ROWS * spec.H * spec.D)
    keys = at_batch(keys, batch, per.KEYS, spec.KEY_ELEMENTS)
    values = at_batch(values, batch, per.VALUES, spec.VALUE_ELEMENTS)
    if spec.TABLE > 0:
        tables = at_batch(tables, batch, per.TABLES, spec.SEQUENCES * spec.TABLE)
    work, shares, sinks = plan_of(work, shares, sinks, batch, spec, per)
    if spec.ALIBI:
        slopes = at_batch(slopes, batch, per.SLOPES, spec.H)
    if spec.QQ > 0:
        qq_bias = at_batch(qq_bias, batch, per.QQ_BIAS, spec.QQ * spec.QQ)
    output, lse = output + batch * spec.ROWS * spec.H * spec.DV, lse + batch * spec.ROWS * spec.H
    slots = batch * spec.PROGRAMS * spec.SPLITS * 2 * spec.M
    parts, row_maxima, row_sums = parts + slots * spec.BV, row_maxima + slots, row_sums + slots
    m = tl.arange(0, spec.M)
    share, total = tl.load(shares + spec.PROGRAMS * 2), tl.load(shares + spec.PROGRAMS * 2 + 1)
    entry, begin = tl.load(shares + program * 2), tl.load(shares + program * 2 + 1)
    end = tl.minimum(begin + share, total)
    at = begin
    while at < end:
        own = work + entry * FIELDS
        start, tiles = tl.load(own + START), tl.load(own + TILES)
        row, rows = tl.load(own + ROW), tl.load(own + ROWS)
        head = (at - start) // tiles
        first = (at - start) % tiles
        count = tl.minimum(tiles - first, end - at)
        q_head = head * spec.SPLITS + split
        q, q_rotary = load_queries(query, row, rows, q_head, spec)
        acc, tail, row_max, row_sum = attend(
            key_operand(q, spec),
            key_operand(q_rotary, spec),
            keys,
            values,
            tables,
            own,
            head,
            first,
            count,
            slopes_of(slopes, q_head, spec),
            qq_bias,
            spec,
        )
        if count == tiles:
            store_rows(output, lse, acc, tail, row_max, row_sum, row, rows, q_head, sinks, m, spec)
        else:
            slot = ((program * spec.SPLITS + split) * 2 + tl.where(at == begin, 0, 1)).to(tl.int64) * spec.M + m
            tl.store(row_maxima + slot, row_max)
            tl.store(row_sums + slot, row_sum)
            store_part(parts, slot, acc, tail, spec)
        at += count
        entry = tl.where(at == start + tiles * spec.HK, entry + 1, entry)
