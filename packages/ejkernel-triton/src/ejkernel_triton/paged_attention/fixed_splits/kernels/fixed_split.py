"""Paged softmax attention in which the order of a row's sums does not depend on the rest of the call.

    keys     |------ split 0 ------|------ split 1 ------|--- split 2 --|      SPLIT_TILES tiles of keys each
    item        m, l, acc   --fold-->   m, l, acc  --fold-->  m, l, acc        in this order, wherever it is computed

Splits begin at multiples of a fixed number of keys of the sequence, each with an online softmax of its own, and are
folded from the first to the last. Keys that a row does not attend to add exact zeros, so the rows that share a tile and
the ends of their ranges do not matter. The line of all splits is cut into equal shares as in `paged_attention.py`. A
program that begins an item folds its splits into slot 0; one that continues an item stores each of its splits in a slot
of its own, and `fixed_split_combine_kernel` folds those, in the same order. Without CUTS_ITEMS, an item is computed by
the program in whose share it begins.

Sources: those of `paged_attention.py`; He et al. 2025, "Defeating nondeterminism in LLM inference" (fixed split size).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address, minus_inf_to_zero
from ejkernel_triton.paged_attention.kernels.paged_attention import attend_to_key_tile
from ejkernel_triton.paged_attention.kernels.tile import (
    FIELDS_PER_ENTRY,
    FIRST_KEY_TILE_FIELD,
    FIRST_ROW_FIELD,
    KEY_END_FIELD,
    KEY_START_FIELD,
    NUM_KEY_TILES_FIELD,
    NUM_ROWS_FIELD,
    SEQUENCE_FIELD,
    load_alibi_slopes,
    load_positions_and_contexts,
    load_queries,
    offset_to_batch_row,
    store_output_rows,
    to_qk_dtype,
)


@triton.jit
def fold(total_acc, total_max, total_sum, acc, row_max, row_sum):
    """Returns the sum of two partial softmaxes of rows."""
    new_max = tl.maximum(total_max, row_max)
    shift = minus_inf_to_zero(new_max)
    total_weight, weight = tl.exp2(total_max - shift), tl.exp2(row_max - shift)
    # Fused explicitly: the compiler could fuse either of two products with the sum.
    total_sum = tl.fma(total_sum, total_weight, row_sum * weight)
    total_acc = tl.fma(total_acc, tl.broadcast_to(total_weight[:, None], total_acc.shape), acc * weight[:, None])
    return total_acc, new_max, total_sum


@triton.jit
def end_of_tile(
    total_acc, total_max, total_sum, acc, row_max, row_sum, tile, end_tile, first_slot_row, continues, slots,
    spec: tl.constexpr,
):  # fmt: skip
    """Folds a split into the total after its last tile; if the item `continues` from another program, stores it."""
    if ((tile + 1) % spec.SPLIT_TILES == 0) | (tile + 1 == end_tile):
        total_acc, total_max, total_sum = fold(total_acc, total_max, total_sum, acc, row_max, row_sum)
        acc, row_sum = tl.zeros_like(acc), tl.zeros_like(row_sum)
        row_max = tl.zeros_like(row_max) - float("inf")
        if spec.CUTS_ITEMS:
            slot_row = first_slot_row + tl.where(continues, tile // spec.SPLIT_TILES, 0) * spec.SLOT_ROWS
            # A number of rows: Triton's interpreter converts the & of a boolean vector and a scalar to integers.
            rows = tl.where(continues, spec.SLOT_ROWS, 0)
            store_slot(total_acc, total_max, total_sum, slot_row, rows, slots, spec)
            total_acc = tl.where(continues, 0.0, total_acc)
            total_sum = tl.where(continues, 0.0, total_sum)
            total_max = tl.where(continues, float("-inf"), total_max)
    return total_acc, total_max, total_sum, acc, row_max, row_sum


@triton.jit
def store_slot(acc, row_max, row_sum, slot_row, num_rows, slots, spec: tl.constexpr):
    """Stores a partial softmax of `num_rows` rows in the slot whose first row is `slot_row`."""
    partial_accs, partial_row_maxima, partial_row_sums = slots
    m = tl.arange(0, spec.M)
    rows, mask = slot_row + m, m < num_rows
    tl.store(partial_row_maxima + rows, row_max, mask=mask)
    tl.store(partial_row_sums + rows, row_sum, mask=mask)
    tl.store(partial_accs + rows[:, None] * spec.BV + tl.arange(0, spec.BV)[None, :], acc, mask=mask[:, None])


@triton.jit
def attend_in_splits(
    q, q_rotary, keys, values, block_tables, entry_address, positions, head, first_split, num_splits, slot_row,
    continues, slots, alibi_slopes, qq_bias, qq_bias_table_ranges,
    spec: tl.constexpr,
):  # fmt: skip
    """Folds `num_splits` splits of an item, of which `first_split` is the first of the sequence's.

    Returns:
        acc [M, BV], unnormalised, row_max [M] and row_sum [M], in log2; those of no split if the item `continues`: its
        splits are stored.
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
    acc, total_acc = tl.zeros([M, BV], tl.float32), tl.zeros([M, BV], tl.float32)
    row_max, total_max = tl.full([M], float("-inf"), tl.float32), tl.full([M], float("-inf"), tl.float32)
    row_sum, total_sum = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    rotary_acc = tl.zeros([M, BR], tl.float32)
    tile_begin = tl.maximum(first_split * spec.SPLIT_TILES, key_start // spec.BLOCK_KV)
    tile_end = tl.minimum((first_split + num_splits) * spec.SPLIT_TILES, (key_end + spec.BLOCK_KV - 1) // spec.BLOCK_KV)
    # The first split of the item has slot 1, so split s has slot s + 1 - first_split.
    first_slot_row = slot_row + tl.cast(1 - first_split, tl.int64) * spec.SLOT_ROWS
    full_tile_end = tile_begin
    if spec.HAS_UNMASKED_LOOP:
        # Tiles stay in their order: only at its end a range has tiles that rows see a part of.
        unmasked_key_end = key_end
        if spec.WINDOW_RIGHT is not None:
            unmasked_key_end = tl.minimum(key_end, position + spec.WINDOW_RIGHT + 1)
        if spec.NUM_QQ_BIAS_ELEMENTS > 0:
            unmasked_key_end = tl.minimum(unmasked_key_end, context_len)
        full_tile_end = tl.minimum(tl.maximum(unmasked_key_end // spec.BLOCK_KV, tile_begin), tile_end)
        for tile in tl.range(tile_begin, full_tile_end):
            acc, rotary_acc, row_max, row_sum = attend_to_key_tile(
                acc, rotary_acc, row_max, row_sum, q, q_rotary, keys, values, block_tables, sequence, position,
                context_len, key_start, key_end, head, tile, alibi_slopes, qq_bias, num_qq_bias_rows,
                False, spec,
            )  # fmt: skip
            total_acc, total_max, total_sum, acc, row_max, row_sum = end_of_tile(
                total_acc, total_max, total_sum, acc, row_max, row_sum, tile, tile_end, first_slot_row, continues,
                slots, spec,
            )  # fmt: skip
    for tile in tl.range(full_tile_end, tile_end, num_stages=spec.PARTIAL_TILE_STAGES):
        acc, rotary_acc, row_max, row_sum = attend_to_key_tile(
            acc, rotary_acc, row_max, row_sum, q, q_rotary, keys, values, block_tables, sequence, position,
            context_len, key_start, key_end, head, tile, alibi_slopes, qq_bias, num_qq_bias_rows,
            True, spec,
        )  # fmt: skip
        total_acc, total_max, total_sum, acc, row_max, row_sum = end_of_tile(
            total_acc, total_max, total_sum, acc, row_max, row_sum, tile, tile_end, first_slot_row, continues,
            slots, spec,
        )  # fmt: skip
    return total_acc, total_max, total_sum


@triton.jit
def fixed_split_kernel(
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
    """Processes a program's share of the splits; see the diagram at the top.

    The arguments are those of `paged_attention_kernel`, with splits as the tiles of `work_list` and `program_shares`.
    """
    M: tl.constexpr = spec.M
    BR: tl.constexpr = spec.BLOCK_ROTARY
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
    output, lse = output + batch * spec.NUM_QUERY_ROWS * spec.H * spec.DV, lse + batch * spec.NUM_QUERY_ROWS * spec.H
    slots = (partial_accs, partial_row_maxima, partial_row_sums)
    slot = ((batch * spec.NUM_PROGRAMS + program) * spec.HEAD_TILES_PER_KV_HEAD + head_tile) * spec.SLOTS_PER_PROGRAM
    slot_row = slot * spec.SLOT_ROWS
    m = tl.arange(0, spec.M)
    splits_per_share, total_splits = (
        tl.load(program_shares + spec.NUM_PROGRAMS * 2),
        tl.load(program_shares + spec.NUM_PROGRAMS * 2 + 1),
    )
    entry, share_start = tl.load(program_shares + program * 2), tl.load(program_shares + program * 2 + 1)
    share_end = tl.minimum(share_start + splits_per_share, total_splits)
    split_index = share_start
    if not spec.CUTS_ITEMS:
        # The program before has the item in which the share starts.
        entry_address = work_list + entry * FIELDS_PER_ENTRY
        entry_start = tl.load(entry_address + FIRST_KEY_TILE_FIELD)
        splits_per_head = tl.maximum(tl.load(entry_address + NUM_KEY_TILES_FIELD), 1)
        split_index += (splits_per_head - (split_index - entry_start) % splits_per_head) % splits_per_head
        entry = tl.where(split_index == entry_start + splits_per_head * spec.HK, entry + 1, entry)
    while split_index < share_end:
        entry_address = work_list + entry * FIELDS_PER_ENTRY
        entry_start, splits_per_head = (
            tl.load(entry_address + FIRST_KEY_TILE_FIELD),
            tl.load(entry_address + NUM_KEY_TILES_FIELD),
        )
        first_row, num_rows = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + NUM_ROWS_FIELD)
        head = (split_index - entry_start) // splits_per_head
        first_split = (split_index - entry_start) % splits_per_head
        num_splits = splits_per_head - first_split
        if spec.CUTS_ITEMS:
            num_splits = tl.minimum(num_splits, share_end - split_index)
        # Splits of a sequence are counted from its first key, those of an item from the split of its first key.
        sequence_split = tl.load(entry_address + KEY_START_FIELD) // (spec.BLOCK_KV * spec.SPLIT_TILES) + first_split
        q_head = head * spec.HEAD_TILES_PER_KV_HEAD + head_tile
        q, q_rotary = load_queries(query, first_row, num_rows, q_head, spec)
        acc, row_max, row_sum = attend_in_splits(
            to_qk_dtype(q, spec),
            to_qk_dtype(q_rotary, spec),
            keys,
            values,
            block_tables,
            entry_address,
            positions,
            head,
            sequence_split,
            num_splits,
            slot_row,
            first_split > 0,
            slots,
            load_alibi_slopes(alibi_slopes, q_head, spec),
            qq_bias,
            qq_bias_table_ranges,
            spec,
        )
        if num_splits == splits_per_head:
            rotary_acc = tl.zeros([M, BR], tl.float32)
            store_output_rows(
                output, lse, acc, rotary_acc, row_max, row_sum, first_row, num_rows, q_head, sinks, m, spec
            )
        elif first_split == 0:
            store_slot(acc, row_max, row_sum, slot_row, spec.SLOT_ROWS, slots, spec)
        split_index += num_splits
        # After the last head of this entry comes the next entry.
        entry = tl.where(split_index == entry_start + splits_per_head * spec.HK, entry + 1, entry)
