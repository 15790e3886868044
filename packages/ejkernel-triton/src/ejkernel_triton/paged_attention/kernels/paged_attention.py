"""Paged softmax attention by persistent programs with equal shares of all key tiles (stream-K).

                 entry 0 (long)              entry 1   entry 2
    head 0          head 1          ...    h0 h1 ..   h0 h1 ..       key tiles of all entries and KV heads, in order
    |t t t t t t t|t t t t t t t|  ...  |t t|t t| ... |t|t| ... |
    |-- program 0 --|-- program 1 --|-- program 2 --| ...            equal shares of the line: "stream-K"

A program loops over its share. An item is one KV head of one entry. If a program has all tiles of an item, it stores
the output directly. If other programs have some of them (split-KV), it stores the unnormalised accumulator, the row
maximum and the denominator in one of its two slots: slot 2p if its share starts with a tile of the item, slot 2p + 1 if
its share ends with one. `split_combine_kernel` merges the slots of an item.

So the time of a call depends on the sum of the lengths and not on the longest, nothing is recompiled when lengths
change, and the workspace has two tiles per program for any lengths.

Sources: Milakov & Gimelshein 2018 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (paged attention); Osama et al.
2023, arXiv:2301.03598 (stream-K); Dao et al. 2023 (Flash-Decoding: merging partial softmaxes).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, at_batch, dot, finite
from ejkernel_triton.paged_attention.kernels.tile import (
    FIELDS,
    HIGH,
    LOW,
    ROW,
    ROWS,
    SEQUENCE,
    START,
    TILES,
    key_operand,
    load_positions,
    load_queries,
    load_rows,
    load_share,
    pages_of,
    row_positions,
    scores_of,
    slopes_of,
    store_partial,
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
    qq_rows,
    PARTIAL: tl.constexpr,
    spec: tl.constexpr,
):
    """Performs one step of the online softmax over a tile of keys and values. PARTIAL tiles mask by window, chunk and
    causal order, and may have keys of new tokens.
    """
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    d = tl.arange(0, spec.BD)
    dv = tl.arange(0, spec.BV)
    r = tl.arange(0, spec.BR)
    k_head = keys + tl.cast(head, tl.int64) * spec.KEY_STRIDES[2]
    v_head = values + tl.cast(head, tl.int64) * spec.VALUE_STRIDES[2] + spec.VALUE_OFFSET
    k = tile * spec.BLOCK_KV + tl.arange(0, spec.BLOCK_KV)
    # Slots outside of the sequence are never read: they may hold other sequences' tokens, or NaN.
    page, valid = pages_of(tables, sequence, tile, k, (k >= low) & (k < high), spec)
    # Scores. A latent cache takes two products: tiles are powers of two, so 512 + 64 columns at once would be 1024.
    k_tile = load_rows(k_head, page, tile, k, valid, d, d < spec.D - spec.ROTARY, False, spec)
    products = dot(q, tl.trans(key_operand(k_tile, spec)), spec)
    if spec.ROTARY > 0:
        r_tile = load_rows(v_head, page, tile, k, valid, r, r < spec.ROTARY, True, spec)
        products = add_dot(products, q_rotary, tl.trans(key_operand(r_tile, spec)), spec)
    PAIRS: tl.constexpr = spec.QQ > 0 if PARTIAL else False
    scores = scores_of(products, k, position, context, m, slopes, qq_bias, qq_rows, PAIRS, spec)
    # `m < M` is always true; it broadcasts the row of keys to a tile.
    allowed = valid[None, :] & (m < spec.M)[:, None]
    if PARTIAL:
        # Row m is query row m // G.
        if spec.RIGHT is not None:
            allowed = allowed & (k[None, :] <= (row_positions(position, m, spec) + spec.RIGHT)[:, None])
        if spec.LEFT is not None:
            allowed = allowed & (k[None, :] >= (row_positions(position, m, spec) - spec.LEFT)[:, None])
        if spec.CHUNK is not None:
            # Division rounds to 0: a row before its sequence's first token would be in the first chunk.
            row = row_positions(position, m, spec)
            chunk = tl.where(row < 0, -spec.CHUNK, row // spec.CHUNK * spec.CHUNK)
            allowed = allowed & (k[None, :] >= chunk[:, None]) & (k[None, :] < (chunk + spec.CHUNK)[:, None])
    scores = tl.where(allowed, scores, float("-inf"))
    # Online softmax. `finite` is for rows without any key so far: -inf - -inf would be NaN.
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = finite(new_max)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    if spec.LATENT > 0:
        # The tile in shared memory is the operand of both products: a latent vector is read once from HBM.
        v_tile = value_operand(k_tile, spec)
    else:
        # Masked slots are read as 0: a weight of 0 times NaN would be NaN.
        v_tile = load_rows(v_head, page, tile, k, valid, dv, dv < spec.DV, True, spec)
        v_tile = value_operand(v_tile, spec)
    acc = add_dot(acc * alpha[:, None], p.to(v_tile.dtype), v_tile, spec)
    if spec.TAIL:
        # Rotary columns that are values have a separate accumulator, so that each has a power of two of columns.
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
    positions,
    head,
    first,
    count,
    slopes,
    qq_bias,
    qq_tables,
    spec: tl.constexpr,
):
    """Computes the online softmax of an item over `count` of its key tiles, from tile `first` on.

    Returns:
        acc [M, BV] and tail [M, BR], unnormalised, row_max [M] and row_sum [M], in log2. `tail` accumulates the rotary
        columns, if those are values too.
    """
    M: tl.constexpr = spec.M
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BR
    sequence, low, high = tl.load(work + SEQUENCE), tl.load(work + LOW), tl.load(work + HIGH)
    m = tl.arange(0, M)
    row, rows = tl.load(work + ROW), tl.load(work + ROWS)
    position, context = load_positions(work, positions, row, rows, m, spec)
    qq_rows = spec.QQ_ROWS
    if spec.QQ_PER_SEQUENCE:
        qq_bias = qq_bias + tl.cast(sequence, tl.int64) * (spec.QQ_ROWS * spec.QQ_ROWS)
    if spec.QQ_PACKED:
        qq_bias = qq_bias + tl.load(qq_tables + sequence * 2)
        qq_rows = tl.load(qq_tables + sequence * 2 + 1)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BV], tl.float32)
    tail = tl.zeros([M, BR], tl.float32)
    # Tiles of an item are counted from the one that contains its first key.
    first_tile = low // spec.BLOCK_KV + first
    full_start, full_end = first_tile, first_tile
    if spec.FULL_TILES:
        # Full tiles first, in a loop without masks; then the partial tiles at both ends of the range. The online
        # softmax gives the same result in any order of tiles.
        full_low, full_high = low, high
        # Every row attends to a full tile: the last row bounds it on the left, the first on the right.
        if spec.ROW_POSITIONS:
            first_row = tl.min(tl.where(m < rows * spec.G, position, 2147483647), 0)
            last_row = tl.max(position, 0)
        else:
            first_row, last_row = position, position + spec.BLOCK_Q - 1
        if spec.LEFT is not None:
            full_low = tl.maximum(low, last_row - spec.LEFT)
        if spec.RIGHT is not None:
            full_high = tl.minimum(high, first_row + spec.RIGHT + 1)
        if spec.CHUNK is not None:
            full_low = tl.maximum(full_low, last_row // spec.CHUNK * spec.CHUNK)
            chunk_end = tl.where(first_row < 0, 0, (first_row // spec.CHUNK + 1) * spec.CHUNK)
            full_high = tl.minimum(full_high, chunk_end)
        if spec.QQ > 0:
            # Full tiles have no keys of new tokens, so they load no biases of pairs.
            full_high = tl.minimum(full_high, context)
        full_start = tl.minimum(
            tl.maximum((full_low + spec.BLOCK_KV - 1) // spec.BLOCK_KV, first_tile), first_tile + count
        )
        full_end = tl.minimum(tl.maximum(full_high // spec.BLOCK_KV, full_start), first_tile + count)
        for tile in tl.range(full_start, full_end):
            acc, tail, row_max, row_sum = attend_tile(
                acc, tail, row_max, row_sum, q, q_rotary, keys, values, tables, sequence, position, context,
                low, high, head, tile, slopes, qq_bias, qq_rows,
                False, spec,
            )  # fmt: skip
    # The partial tiles of both ends are in one loop, which skips the full ones: a second loop would double the code.
    partial_end = first_tile + count - (full_end - full_start)
    for step in tl.range(first_tile, partial_end, num_stages=spec.PARTIAL_STAGES):
        tile = step
        if spec.FULL_TILES:
            tile = tl.where(step < full_start, step, step + (full_end - full_start))
        acc, tail, row_max, row_sum = attend_tile(
            acc, tail, row_max, row_sum, q, q_rotary, keys, values, tables, sequence, position, context,
            low, high, head, tile, slopes, qq_bias, qq_rows,
            True, spec,
        )  # fmt: skip
    return acc, tail, row_max, row_sum


@triton.jit
def paged_attention_kernel(
    query,
    keys,
    values,
    tables,
    work,
    shares,
    sinks,
    slopes,
    qq_bias,
    qq_tables,
    positions,
    output,
    lse,
    parts,
    row_maxima,
    row_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes the key tiles of a program's share; see the diagram at the top.

    `work` has the entries, `shares` the entry and the tile at which each program starts and, last, the tiles per share
    and in total. Unused slots of `parts` are not written.
    """
    program = tl.program_id(0)
    # Neighbouring programs have the same keys and other query heads: the keys are read from HBM once, then from L2.
    split = program % spec.SPLITS
    batch = tl.cast(program // (spec.SPLITS * spec.PROGRAMS), tl.int64)
    program = program // spec.SPLITS % spec.PROGRAMS
    query = at_batch(query, batch, per.QUERY, spec.ROWS * spec.H * spec.D)
    keys = at_batch(keys, batch, per.KEYS, spec.KEY_ELEMENTS)
    values = at_batch(values, batch, per.VALUES, spec.VALUE_ELEMENTS)
    if spec.TABLE > 0:
        tables = at_batch(tables, batch, per.TABLES, spec.SEQUENCES * spec.TABLE)
    work, shares, sinks = load_share(work, shares, sinks, batch, spec, per)
    if spec.ALIBI:
        slopes = at_batch(slopes, batch, per.SLOPES, spec.H)
    if spec.QQ > 0:
        qq_bias = at_batch(qq_bias, batch, per.QQ_BIAS, spec.QQ)
    if spec.QQ_PACKED:
        qq_tables = at_batch(qq_tables, batch, per.QQ_TABLES, spec.SEQUENCES * 2)
    if spec.ROW_POSITIONS:
        positions = at_batch(positions, batch, per.POSITIONS, spec.ROWS * 2)
    output, lse = output + batch * spec.ROWS * spec.H * spec.DV, lse + batch * spec.ROWS * spec.H
    slots = batch * spec.PROGRAMS * spec.SPLITS * 2 * spec.M
    PART: tl.constexpr = spec.BV + (spec.BR if spec.TAIL else 0)
    parts, row_maxima, row_sums = parts + slots * PART, row_maxima + slots, row_sums + slots
    m = tl.arange(0, spec.M)
    # `at` is an index in the order of all key tiles, from the program's first tile to the end of its share.
    share, total = tl.load(shares + spec.PROGRAMS * 2), tl.load(shares + spec.PROGRAMS * 2 + 1)
    entry, first_tile = tl.load(shares + program * 2), tl.load(shares + program * 2 + 1)
    end = tl.minimum(first_tile + share, total)
    at = first_tile
    while at < end:
        entry_at = work + entry * FIELDS
        start, tiles = tl.load(entry_at + START), tl.load(entry_at + TILES)
        row, rows = tl.load(entry_at + ROW), tl.load(entry_at + ROWS)
        # An entry's tiles are ordered by head. The item ends with its head's tiles or with the share.
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
            entry_at,
            positions,
            head,
            first,
            count,
            slopes_of(slopes, q_head, spec),
            qq_bias,
            qq_tables,
            spec,
        )
        if count == tiles:
            store_rows(output, lse, acc, tail, row_max, row_sum, row, rows, q_head, sinks, m, spec)
        else:
            # Split-KV: the item continues in another program's share. `split_combine_kernel`, the next launch, reads
            # the slot. Items between a share's first and last are complete, so two slots suffice.
            slot = ((program * spec.SPLITS + split) * 2 + tl.where(at == first_tile, 0, 1)).to(tl.int64) * spec.M + m
            tl.store(row_maxima + slot, row_max)
            tl.store(row_sums + slot, row_sum)
            store_partial(parts, slot, acc, tail, spec)
        at += count
        # After the last head of this entry comes the next entry.
        entry = tl.where(at == start + tiles * spec.HK, entry + 1, entry)
