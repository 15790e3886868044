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

from ejkernel_triton.blocks import add_dot, batch_row_address, dot, minus_inf_to_zero
from ejkernel_triton.paged_attention.kernels.tile import (
    FIELDS_PER_ENTRY,
    FIRST_KEY_TILE_FIELD,
    FIRST_ROW_FIELD,
    KEY_END_FIELD,
    KEY_START_FIELD,
    NUM_KEY_TILES_FIELD,
    NUM_ROWS_FIELD,
    SEQUENCE_FIELD,
    compute_log2_scores,
    load_alibi_slopes,
    load_cache_rows,
    load_page_indices,
    load_positions_and_contexts,
    load_queries,
    offset_to_batch_row,
    positions_of_rows,
    store_output_rows,
    store_partial_acc,
    to_pv_dtype,
    to_qk_dtype,
)


@triton.jit
def sum_in_fixed_order(x):
    """Returns the sums of rows, halves added to halves: an order that does not depend on how threads share a tile."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if COLUMNS == 1:
        return tl.reshape(x, [ROWS])
    else:
        return sum_in_fixed_order(tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), 1))


@triton.jit
def attend_to_key_tile(
    acc,
    rotary_acc,
    row_max,
    row_sum,
    q,
    q_rotary,
    keys,
    values,
    block_tables,
    sequence,
    position,
    context_len,
    key_start,
    key_end,
    head,
    tile,
    alibi_slopes,
    qq_bias,
    num_qq_bias_rows,
    IS_PARTIAL_TILE: tl.constexpr,
    spec: tl.constexpr,
):
    """Performs one step of the online softmax over a tile of keys and values. IS_PARTIAL_TILE tiles mask by window,
    chunk and causal order, and may have keys of new tokens.
    """
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    d = tl.arange(0, spec.BD)
    dv = tl.arange(0, spec.BV)
    r = tl.arange(0, spec.BLOCK_ROTARY)
    key_head_base = keys + tl.cast(head, tl.int64) * spec.KEY_STRIDES[2]
    value_head_base = values + tl.cast(head, tl.int64) * spec.VALUE_STRIDES[2] + spec.VALUE_OFFSET
    k = tile * spec.BLOCK_KV + tl.arange(0, spec.BLOCK_KV)
    # Slots outside of the sequence are never read: they may hold other sequences' tokens, or NaN.
    page, valid = load_page_indices(block_tables, sequence, tile, k, (k >= key_start) & (k < key_end), spec)
    # Scores. A latent cache takes two products: tiles are powers of two, so 512 + 64 columns at once would be 1024.
    k_tile = load_cache_rows(key_head_base, page, tile, k, valid, d, d < spec.D - spec.ROTARY_DIM, False, spec)
    products = dot(q, tl.trans(to_qk_dtype(k_tile, spec)), spec)
    if spec.ROTARY_DIM > 0:
        rotary_tile = load_cache_rows(value_head_base, page, tile, k, valid, r, r < spec.ROTARY_DIM, True, spec)
        products = add_dot(products, q_rotary, tl.trans(to_qk_dtype(rotary_tile, spec)), spec)
    HAS_QQ_BIAS: tl.constexpr = spec.NUM_QQ_BIAS_ELEMENTS > 0 if IS_PARTIAL_TILE else False
    scores = compute_log2_scores(
        products, k, position, context_len, m, alibi_slopes, qq_bias, num_qq_bias_rows, HAS_QQ_BIAS, spec
    )
    # `m < M` is always true; it broadcasts the row of keys to a tile.
    attends = valid[None, :] & (m < spec.M)[:, None]
    if IS_PARTIAL_TILE:
        # Row m is query row m // G.
        if spec.WINDOW_RIGHT is not None:
            attends = attends & (k[None, :] <= (positions_of_rows(position, m, spec) + spec.WINDOW_RIGHT)[:, None])
        if spec.WINDOW_LEFT is not None:
            attends = attends & (k[None, :] >= (positions_of_rows(position, m, spec) - spec.WINDOW_LEFT)[:, None])
        if spec.CHUNK_SIZE is not None:
            # Division rounds to 0: a row before its sequence's first token would be in the first chunk.
            row_position = positions_of_rows(position, m, spec)
            chunk_start = tl.where(
                row_position < 0, -spec.CHUNK_SIZE, row_position // spec.CHUNK_SIZE * spec.CHUNK_SIZE
            )
            attends = (
                attends & (k[None, :] >= chunk_start[:, None]) & (k[None, :] < (chunk_start + spec.CHUNK_SIZE)[:, None])
            )
    scores = tl.where(attends, scores, float("-inf"))
    # Online softmax. `minus_inf_to_zero` is for rows without any key so far: -inf - -inf would be NaN.
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = minus_inf_to_zero(new_max)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + (sum_in_fixed_order(p) if spec.SPLIT_TILES > 0 else tl.sum(p, 1))
    if spec.LATENT_DIM > 0:
        # The tile in shared memory is the operand of both products: a latent vector is read once from HBM.
        v_tile = to_pv_dtype(k_tile, spec)
    else:
        # Masked slots are read as 0: a weight of 0 times NaN would be NaN.
        v_tile = load_cache_rows(value_head_base, page, tile, k, valid, dv, dv < spec.DV, True, spec)
        v_tile = to_pv_dtype(v_tile, spec)
    acc = add_dot(acc * alpha[:, None], p.to(v_tile.dtype), v_tile, spec)
    if spec.ROTARY_IS_VALUE:
        # Rotary columns that are values have a separate accumulator, so that each has a power of two of columns.
        rotary_acc = add_dot(rotary_acc * alpha[:, None], p.to(v_tile.dtype), to_pv_dtype(rotary_tile, spec), spec)
    return acc, rotary_acc, new_max, row_sum


@triton.jit
def attend_to_key_tiles(
    q,
    q_rotary,
    keys,
    values,
    block_tables,
    entry_address,
    positions,
    head,
    first_key_tile,
    num_tiles,
    alibi_slopes,
    qq_bias,
    qq_bias_table_ranges,
    spec: tl.constexpr,
):
    """Computes the online softmax of an item over `num_tiles` of its key tiles, from tile `first_key_tile` on.

    Returns:
        acc [M, BV] and rotary_acc [M, BLOCK_ROTARY], unnormalised, row_max [M] and row_sum [M], in log2. `rotary_acc`
        accumulates the rotary columns, if those are values too.
    """
    M: tl.constexpr = spec.M
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BLOCK_ROTARY
    sequence, key_start, key_end = (
        tl.load(entry_address + SEQUENCE_FIELD),
        tl.load(entry_address + KEY_START_FIELD),
        tl.load(entry_address + KEY_END_FIELD),
    )
    m = tl.arange(0, M)
    first_row, num_rows = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + NUM_ROWS_FIELD)
    position, context_len = load_positions_and_contexts(entry_address, positions, first_row, num_rows, m, spec)
    num_qq_bias_rows = spec.NUM_QQ_BIAS_ROWS
    if spec.HAS_QQ_BIAS_PER_SEQUENCE:
        qq_bias = qq_bias + tl.cast(sequence, tl.int64) * (spec.NUM_QQ_BIAS_ROWS * spec.NUM_QQ_BIAS_ROWS)
    if spec.QQ_BIAS_IS_PACKED:
        qq_bias = qq_bias + tl.load(qq_bias_table_ranges + sequence * 2)
        num_qq_bias_rows = tl.load(qq_bias_table_ranges + sequence * 2 + 1)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BV], tl.float32)
    rotary_acc = tl.zeros([M, BR], tl.float32)
    # Tiles of an item are counted from the one that contains its first key.
    first_tile = key_start // spec.BLOCK_KV + first_key_tile
    full_tile_start, full_tile_end = first_tile, first_tile
    if spec.HAS_UNMASKED_LOOP:
        # Full tiles first, in a loop without masks; then the partial tiles at both ends of the range. The online
        # softmax gives the same result in any order of tiles.
        unmasked_key_start, unmasked_key_end = key_start, key_end
        # Every row attends to a full tile: the last row bounds it on the left, the first on the right.
        if spec.LOAD_ROW_POSITIONS:
            first_row_position = tl.min(tl.where(m < num_rows * spec.G, position, 2147483647), 0)
            last_row_position = tl.max(position, 0)
        else:
            first_row_position, last_row_position = position, position + spec.BLOCK_Q - 1
        if spec.WINDOW_LEFT is not None:
            unmasked_key_start = tl.maximum(key_start, last_row_position - spec.WINDOW_LEFT)
        if spec.WINDOW_RIGHT is not None:
            unmasked_key_end = tl.minimum(key_end, first_row_position + spec.WINDOW_RIGHT + 1)
        if spec.CHUNK_SIZE is not None:
            unmasked_key_start = tl.maximum(unmasked_key_start, last_row_position // spec.CHUNK_SIZE * spec.CHUNK_SIZE)
            chunk_end = tl.where(
                first_row_position < 0, 0, (first_row_position // spec.CHUNK_SIZE + 1) * spec.CHUNK_SIZE
            )
            unmasked_key_end = tl.minimum(unmasked_key_end, chunk_end)
        if spec.NUM_QQ_BIAS_ELEMENTS > 0:
            # Full tiles have no keys of new tokens, so they load no biases of pairs.
            unmasked_key_end = tl.minimum(unmasked_key_end, context_len)
        full_tile_start = tl.minimum(
            tl.maximum((unmasked_key_start + spec.BLOCK_KV - 1) // spec.BLOCK_KV, first_tile), first_tile + num_tiles
        )
        full_tile_end = tl.minimum(
            tl.maximum(unmasked_key_end // spec.BLOCK_KV, full_tile_start), first_tile + num_tiles
        )
        for tile in tl.range(full_tile_start, full_tile_end):
            acc, rotary_acc, row_max, row_sum = attend_to_key_tile(
                acc, rotary_acc, row_max, row_sum, q, q_rotary, keys, values, block_tables, sequence, position,
                context_len, key_start, key_end, head, tile, alibi_slopes, qq_bias, num_qq_bias_rows,
                False, spec,
            )  # fmt: skip
    # The partial tiles of both ends are in one loop, which skips the full ones: a second loop would double the code.
    partial_loop_end = first_tile + num_tiles - (full_tile_end - full_tile_start)
    for step in tl.range(first_tile, partial_loop_end, num_stages=spec.PARTIAL_TILE_STAGES):
        tile = step
        if spec.HAS_UNMASKED_LOOP:
            tile = tl.where(step < full_tile_start, step, step + (full_tile_end - full_tile_start))
        acc, rotary_acc, row_max, row_sum = attend_to_key_tile(
            acc, rotary_acc, row_max, row_sum, q, q_rotary, keys, values, block_tables, sequence, position,
            context_len, key_start, key_end, head, tile, alibi_slopes, qq_bias, num_qq_bias_rows,
            True, spec,
        )  # fmt: skip
    return acc, rotary_acc, row_max, row_sum


@triton.jit
def paged_attention_kernel(
    query,
    keys,
    values,
    block_tables,
    work_list,
    program_shares,
    sinks,
    alibi_slopes,
    qq_bias,
    qq_bias_table_ranges,
    positions,
    output,
    lse,
    partial_accs,
    partial_row_maxima,
    partial_row_sums,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Processes the key tiles of a program's share; see the diagram at the top.

    `work_list` has the entries, `program_shares` the entry and the tile at which each program starts and, last, the
    tiles per share and in total. Unused slots of `partial_accs` are not written.
    """
    program = tl.program_id(0)
    # Neighbouring programs have the same keys and other query heads: the keys are read from HBM once, then from L2.
    head_tile = program % spec.HEAD_TILES_PER_KV_HEAD
    batch = tl.cast(program // (spec.HEAD_TILES_PER_KV_HEAD * spec.NUM_PROGRAMS), tl.int64)
    program = program // spec.HEAD_TILES_PER_KV_HEAD % spec.NUM_PROGRAMS
    query = batch_row_address(query, batch, per.QUERY, spec.NUM_QUERY_ROWS * spec.H * spec.D)
    keys = batch_row_address(keys, batch, per.KEYS, spec.KEY_CACHE_BATCH_STRIDE)
    values = batch_row_address(values, batch, per.VALUES, spec.VALUE_CACHE_BATCH_STRIDE)
    if spec.PAGES_PER_SEQUENCE > 0:
        block_tables = batch_row_address(
            block_tables, batch, per.BLOCK_TABLES, spec.NUM_SEQUENCES * spec.PAGES_PER_SEQUENCE
        )
    work_list, program_shares, sinks = offset_to_batch_row(work_list, program_shares, sinks, batch, spec, per)
    if spec.HAS_ALIBI:
        alibi_slopes = batch_row_address(alibi_slopes, batch, per.ALIBI_SLOPES, spec.H)
    if spec.NUM_QQ_BIAS_ELEMENTS > 0:
        qq_bias = batch_row_address(qq_bias, batch, per.QQ_BIAS, spec.NUM_QQ_BIAS_ELEMENTS)
    if spec.QQ_BIAS_IS_PACKED:
        qq_bias_table_ranges = batch_row_address(
            qq_bias_table_ranges, batch, per.QQ_BIAS_TABLE_RANGES, spec.NUM_SEQUENCES * 2
        )
    if spec.LOAD_ROW_POSITIONS:
        positions = batch_row_address(positions, batch, per.POSITIONS, spec.NUM_QUERY_ROWS * 2)
    output, lse = output + batch * spec.NUM_QUERY_ROWS * spec.H * spec.DV, lse + batch * spec.NUM_QUERY_ROWS * spec.H
    slot_row_offset = batch * spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD * 2 * spec.M
    PARTIAL_ACC_WIDTH: tl.constexpr = spec.BV + (spec.BLOCK_ROTARY if spec.ROTARY_IS_VALUE else 0)
    partial_accs, partial_row_maxima, partial_row_sums = (
        partial_accs + slot_row_offset * PARTIAL_ACC_WIDTH,
        partial_row_maxima + slot_row_offset,
        partial_row_sums + slot_row_offset,
    )
    m = tl.arange(0, spec.M)
    # `tile_index` is an index in the order of all key tiles, from the program's first tile to the end of its share.
    tiles_per_share, total_tiles = (
        tl.load(program_shares + spec.NUM_PROGRAMS * 2),
        tl.load(program_shares + spec.NUM_PROGRAMS * 2 + 1),
    )
    entry, share_start = tl.load(program_shares + program * 2), tl.load(program_shares + program * 2 + 1)
    share_end = tl.minimum(share_start + tiles_per_share, total_tiles)
    tile_index = share_start
    while tile_index < share_end:
        entry_address = work_list + entry * FIELDS_PER_ENTRY
        entry_tile_start, tiles_per_head = (
            tl.load(entry_address + FIRST_KEY_TILE_FIELD),
            tl.load(entry_address + NUM_KEY_TILES_FIELD),
        )
        first_row, num_rows = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + NUM_ROWS_FIELD)
        # An entry's tiles are ordered by head. The item ends with its head's tiles or with the share.
        head = (tile_index - entry_tile_start) // tiles_per_head
        first_key_tile = (tile_index - entry_tile_start) % tiles_per_head
        num_item_tiles = tl.minimum(tiles_per_head - first_key_tile, share_end - tile_index)
        q_head = head * spec.HEAD_TILES_PER_KV_HEAD + head_tile
        q, q_rotary = load_queries(query, first_row, num_rows, q_head, spec)
        acc, rotary_acc, row_max, row_sum = attend_to_key_tiles(
            to_qk_dtype(q, spec),
            to_qk_dtype(q_rotary, spec),
            keys,
            values,
            block_tables,
            entry_address,
            positions,
            head,
            first_key_tile,
            num_item_tiles,
            load_alibi_slopes(alibi_slopes, q_head, spec),
            qq_bias,
            qq_bias_table_ranges,
            spec,
        )
        if num_item_tiles == tiles_per_head:
            store_output_rows(
                output, lse, acc, rotary_acc, row_max, row_sum, first_row, num_rows, q_head, sinks, m, spec
            )
        else:
            # Split-KV: the item continues in another program's share. `split_combine_kernel`, the next launch, reads
            # the slot. Items between a share's first and last are complete, so two slots suffice.
            slot = (
                (program * spec.HEAD_TILES_PER_KV_HEAD + head_tile) * 2 + tl.where(tile_index == share_start, 0, 1)
            ).to(tl.int64) * spec.M + m
            tl.store(partial_row_maxima + slot, row_max)
            tl.store(partial_row_sums + slot, row_sum)
            store_partial_acc(partial_accs, slot, acc, rotary_acc, spec)
        tile_index += num_item_tiles
        # After the last head of this entry comes the next entry.
        entry = tl.where(tile_index == entry_tile_start + tiles_per_head * spec.HK, entry + 1, entry)
