"""Folds the partial softmaxes of the items that more than one program of `fixed_split` has, in the order of splits."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.paged_attention.fixed_splits.kernels.fixed_split import fold
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
def fixed_split_combine_kernel(
    partial_accs,
    partial_row_maxima,
    partial_row_sums,
    work_list,
    program_shares,
    sinks,
    output_of_whole_items,
    lse_of_whole_items,
    output,
    lse,
    spec: tl.constexpr,
    per: tl.constexpr,
    SLOTS_PER_STEP: tl.constexpr,
):
    """Folds one row of the item in which a program's share starts, if that is the first program to continue the item.

    `output` and `lse` alias `output_of_whole_items` and `lse_of_whole_items`; only rows of cut items are written.
    """
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BLOCK_ROTARY
    program_row = tl.program_id(0)
    m = program_row % spec.SLOT_ROWS
    head_tile = program_row // spec.SLOT_ROWS % spec.HEAD_TILES_PER_KV_HEAD
    program = (program_row // (spec.SLOT_ROWS * spec.HEAD_TILES_PER_KV_HEAD)) % spec.NUM_PROGRAMS
    batch = tl.cast(program_row // (spec.SLOT_ROWS * spec.HEAD_TILES_PER_KV_HEAD * spec.NUM_PROGRAMS), tl.int64)
    work_list, program_shares, sinks = offset_to_batch_row(work_list, program_shares, sinks, batch, spec, per)
    ROWS: tl.constexpr = spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD * spec.SLOTS_PER_PROGRAM * spec.SLOT_ROWS
    partial_accs = batch_row_address(partial_accs, batch, per.PARTIAL_ACCS, ROWS * spec.BV)
    partial_row_maxima = batch_row_address(partial_row_maxima, batch, per.PARTIAL_ROW_MAXIMA, ROWS)
    partial_row_sums = batch_row_address(partial_row_sums, batch, per.PARTIAL_ROW_SUMS, ROWS)
    output, lse = output + batch * spec.NUM_QUERY_ROWS * spec.H * spec.DV, lse + batch * spec.NUM_QUERY_ROWS * spec.H
    splits_per_share, total_splits = (
        tl.load(program_shares + spec.NUM_PROGRAMS * 2),
        tl.load(program_shares + spec.NUM_PROGRAMS * 2 + 1),
    )
    entry_address = work_list + tl.load(program_shares + program * 2) * FIELDS_PER_ENTRY
    share_start = tl.load(program_shares + program * 2 + 1)
    # At least one split: programs without a share refer to entries that may have none, and divide by it below.
    entry_start, splits_per_head = (
        tl.load(entry_address + FIRST_KEY_TILE_FIELD),
        tl.maximum(tl.load(entry_address + NUM_KEY_TILES_FIELD), 1),
    )
    first_row, num_rows = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + NUM_ROWS_FIELD)
    head = (share_start - entry_start) // splits_per_head
    item_start = entry_start + head * splits_per_head
    if (
        (share_start < total_splits)
        & (share_start > item_start)
        & (share_start - splits_per_share <= item_start)
        & (m < num_rows * spec.G)
    ):
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BV], tl.float32)
        # Slot 0 of the program before has the splits before this share; each later split has a slot.
        num_slots = 1 + item_start + splits_per_head - share_start
        number = tl.arange(0, SLOTS_PER_STEP)
        for first_slot in tl.range(0, num_slots, SLOTS_PER_STEP):
            split = first_slot + number - 1
            owner = tl.where(split < 0, program - 1, program + split // splits_per_share)
            slot = tl.where(split < 0, 0, 1 + split % splits_per_share)
            slot += (owner * spec.HEAD_TILES_PER_KV_HEAD + head_tile) * spec.SLOTS_PER_PROGRAM
            slot_row = tl.cast(slot, tl.int64) * spec.SLOT_ROWS + m
            valid = split + 1 < num_slots
            # Slots past the last one have maximum -inf, which folds as nothing.
            maxima = tl.load(partial_row_maxima + slot_row, mask=valid, other=float("-inf"))
            sums = tl.load(partial_row_sums + slot_row, mask=valid, other=0.0)
            accs = tl.load(
                partial_accs + slot_row[:, None] * spec.BV + tl.arange(0, spec.BV)[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            for n in tl.static_range(SLOTS_PER_STEP):
                acc, row_max, row_sum = fold(
                    acc,
                    row_max,
                    row_sum,
                    tl.sum(tl.where((number == n)[:, None], accs, 0.0), 0)[None, :],
                    tl.max(tl.where(number == n, maxima, float("-inf")), 0)[None],
                    tl.sum(tl.where(number == n, sums, 0.0), 0)[None],
                )
        q_head = head * spec.HEAD_TILES_PER_KV_HEAD + head_tile
        row_vector = m + tl.zeros([1], tl.int32)
        rotary_acc = tl.zeros([1, BR], tl.float32)
        store_output_rows(
            output, lse, acc, rotary_acc, row_max, row_sum, first_row, num_rows, q_head, sinks, row_vector, spec
        )
