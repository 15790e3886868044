r"""The combine of split-KV: merges the slots of items whose key tiles are split over several programs.

    program p - 1             program p             program p + 1
    slot 2p - 1: m, l, acc    slot 2p: m, l, acc    slot 2p + 2: m, l, acc     partial softmaxes of one item
            \____________________|____________________/
                       m' = max m_i,  l = sum exp2(m_i - m') l_i,  output = sum exp2(m_i - m') acc_i / l

A program merges one row of the item that its program p of `paged_attention_kernel` was the second to process; other
programs return.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address, minus_inf_to_zero
from ejkernel_triton.paged_attention.kernels.tile import (
    FIELDS_PER_ENTRY,
    FIRST_KEY_TILE_FIELD,
    FIRST_ROW_FIELD,
    NUM_KEY_TILES_FIELD,
    NUM_ROWS_FIELD,
    offset_to_batch_row,
    store_output_rows,
)


@triton.jit
def split_combine_kernel(
    partial_accs,
    partial_row_maxima,
    partial_row_sums,
    work_list,
    program_shares,
    sinks,
    output_of_unsplit_items,
    lse_of_unsplit_items,
    output,
    lse,
    spec: tl.constexpr,
    per: tl.constexpr,
    SLOTS_PER_STEP: tl.constexpr,
):
    """Merges one row of the item in which a program's share starts, if that is the first split of the item.

    `output` and `lse` alias `output_of_unsplit_items` and `lse_of_unsplit_items`; only rows of split items are written.
    """
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BLOCK_ROTARY
    program_row = tl.program_id(0)
    # The grid covers the largest case: every row of every program's first item. Which items are split depends on
    # lengths, which may be traced.
    m = program_row % spec.M
    head_tile = program_row // spec.M % spec.HEAD_TILES_PER_KV_HEAD
    program = (program_row // (spec.M * spec.HEAD_TILES_PER_KV_HEAD)) % spec.NUM_PROGRAMS
    batch = tl.cast(program_row // (spec.M * spec.HEAD_TILES_PER_KV_HEAD * spec.NUM_PROGRAMS), tl.int64)
    work_list, program_shares, sinks = offset_to_batch_row(work_list, program_shares, sinks, batch, spec, per)
    PARTIAL_ACC_WIDTH: tl.constexpr = spec.BV + (spec.BLOCK_ROTARY if spec.ROTARY_IS_VALUE else 0)
    SLOT_ROWS: tl.constexpr = spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD * 2 * spec.M
    partial_accs = batch_row_address(partial_accs, batch, per.PARTIAL_ACCS, SLOT_ROWS * PARTIAL_ACC_WIDTH)
    partial_row_maxima = batch_row_address(partial_row_maxima, batch, per.PARTIAL_ROW_MAXIMA, SLOT_ROWS)
    partial_row_sums = batch_row_address(partial_row_sums, batch, per.PARTIAL_ROW_SUMS, SLOT_ROWS)
    output, lse = output + batch * spec.NUM_QUERY_ROWS * spec.H * spec.DV, lse + batch * spec.NUM_QUERY_ROWS * spec.H
    tiles_per_share, total_tiles = (
        tl.load(program_shares + spec.NUM_PROGRAMS * 2),
        tl.load(program_shares + spec.NUM_PROGRAMS * 2 + 1),
    )
    entry_address = work_list + tl.load(program_shares + program * 2) * FIELDS_PER_ENTRY
    share_start = tl.load(program_shares + program * 2 + 1)
    # At least one tile: programs without a share refer to entries that may have none, and divide by it below.
    entry_tile_start, tiles_per_head = (
        tl.load(entry_address + FIRST_KEY_TILE_FIELD),
        tl.maximum(tl.load(entry_address + NUM_KEY_TILES_FIELD), 1),
    )
    first_row, num_rows = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + NUM_ROWS_FIELD)
    head = (share_start - entry_tile_start) // tiles_per_head
    item_tile_start = entry_tile_start + head * tiles_per_head
    previous_share_start = share_start - tiles_per_share
    # Only the second program of an item merges it: its share starts inside the item, and the previous program's does
    # not.
    if (
        (share_start < total_tiles)
        & (share_start > item_tile_start)
        & (previous_share_start <= item_tile_start)
        & (m < num_rows * spec.G)
    ):
        # The previous program has the item's first tiles.
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BV], tl.float32)
        rotary_acc = tl.zeros([1, BR], tl.float32)
        num_slots = 1 + (item_tile_start + tiles_per_head - share_start + tiles_per_share - 1) // tiles_per_share
        # An online softmax over slots, SLOTS_PER_STEP at a time, in the order of programs: results are reproducible bit
        # for bit.
        for first_slot in tl.range(0, num_slots, SLOTS_PER_STEP):
            slot_number = first_slot + tl.arange(0, SLOTS_PER_STEP)
            valid = slot_number < num_slots
            # The first part is in the second slot of its program, unless that program's share starts with the item.
            uses_second_slot = tl.where((slot_number == 0) & (previous_share_start < item_tile_start), 1, 0)
            slot = ((program - 1 + slot_number) * spec.HEAD_TILES_PER_KV_HEAD + head_tile) * 2 + uses_second_slot
            slot_row = tl.cast(slot * spec.M + m, tl.int64)
            # Slots past the last one have maximum -inf, so weight 0.
            slot_row_maxima = tl.load(partial_row_maxima + slot_row, mask=valid, other=float("-inf"))
            slot_row_sums = tl.load(partial_row_sums + slot_row, mask=valid, other=0.0)
            dv = tl.arange(0, BV)
            slot_accs = tl.load(
                partial_accs + slot_row[:, None] * PARTIAL_ACC_WIDTH + dv[None, :], mask=valid[:, None], other=0.0
            )
            new_max = tl.maximum(row_max, tl.max(slot_row_maxima, 0))
            shift = minus_inf_to_zero(new_max)
            # Each slot is relative to its own maximum: rescale to the common one.
            weights = tl.exp2(slot_row_maxima - shift)
            alpha = tl.exp2(row_max - shift)
            row_sum = row_sum * alpha + tl.sum(slot_row_sums * weights, 0)
            acc = acc * alpha[:, None] + tl.sum(slot_accs * weights[:, None], 0)[None, :]
            if spec.ROTARY_IS_VALUE:
                r = BV + tl.arange(0, BR)
                slot_rotary_accs = tl.load(
                    partial_accs + slot_row[:, None] * PARTIAL_ACC_WIDTH + r[None, :], mask=valid[:, None], other=0.0
                )
                rotary_acc = rotary_acc * alpha[:, None] + tl.sum(slot_rotary_accs * weights[:, None], 0)[None, :]
            row_max = new_max
        q_head = head * spec.HEAD_TILES_PER_KV_HEAD + head_tile
        row_vector = m + tl.zeros([1], tl.int32)
        store_output_rows(
            output, lse, acc, rotary_acc, row_max, row_sum, first_row, num_rows, q_head, sinks, row_vector, spec
        )
