"""Writes new tokens into their pages, in place.

    new keys, values [T, HK, D]  --block table-->  page, slot  -->  pages, aliased input and output

A program writes one tile of query rows, for one head of the cache and one component (keys or values).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.paged_attention.kernels.tile import (
    FIELDS_PER_ENTRY,
    FIRST_POSITION_FIELD,
    FIRST_ROW_FIELD,
    NUM_ROWS_FIELD,
    SEQUENCE_FIELD,
)


@triton.jit
def cache_write_kernel(
    keys,
    values,
    work_list,
    block_tables,
    initial_pages,
    pages,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Writes rows of `keys` or, as the second component, of `values` to their slots according to the block tables.

    `pages` aliases `initial_pages`, and only slots of new tokens are written. Rows have the cache's width: its padding
    lanes and heads become 0, and so do the lanes between the two parts of a latent row.
    """
    W: tl.constexpr = spec.PADDED_ROW_WIDTH
    BQ: tl.constexpr = spec.BLOCK_Q
    program = tl.program_id(0)
    component = program % spec.KV_COMPONENTS
    head = program // spec.KV_COMPONENTS % spec.CACHE_HEADS
    entry = program // (spec.KV_COMPONENTS * spec.CACHE_HEADS) % spec.NUM_ENTRIES
    batch = tl.cast(program // (spec.KV_COMPONENTS * spec.CACHE_HEADS * spec.NUM_ENTRIES), tl.int64)
    keys = batch_row_address(keys, batch, per.KEYS, spec.NUM_TOKENS * spec.HK * spec.D)
    if spec.KV_COMPONENTS == 2:
        values = batch_row_address(values, batch, per.VALUES, spec.NUM_TOKENS * spec.HK * spec.D)
    block_tables = batch_row_address(
        block_tables, batch, per.BLOCK_TABLES, spec.NUM_SEQUENCES * spec.PAGES_PER_SEQUENCE
    )
    entry_address = (
        batch_row_address(work_list, batch, per.WORK_LIST, spec.NUM_ENTRIES * FIELDS_PER_ENTRY)
        + entry * FIELDS_PER_ENTRY
    )
    sequence, first_row, num_rows = (
        tl.load(entry_address + SEQUENCE_FIELD),
        tl.load(entry_address + FIRST_ROW_FIELD),
        tl.load(entry_address + NUM_ROWS_FIELD),
    )
    r = tl.arange(0, BQ)
    # Positions past the table, and entries that are no valid page index, are padding and are never written.
    position = tl.load(entry_address + FIRST_POSITION_FIELD) + r
    page_in_sequence = position // spec.PAGE_SIZE
    valid = (r < num_rows) & (position >= 0) & (page_in_sequence < spec.PAGES_PER_SEQUENCE)
    page = tl.load(block_tables + sequence * spec.PAGES_PER_SEQUENCE + page_in_sequence, mask=valid, other=-1)
    valid = valid & (page >= 0) & (page < spec.NUM_PAGES)
    # 64 bits: a cache may have more than 2 ** 31 elements.
    slot = tl.where(valid, position % spec.PAGE_SIZE, 0)
    slot_offsets = (
        tl.cast(tl.where(valid, page, 0), tl.int64) * spec.PAGE_SLOT_HEAD_STRIDES[0]
        + slot * spec.PAGE_SLOT_HEAD_STRIDES[1]
    )
    c = tl.arange(0, W)
    # Columns up to NUM_LEADING_COLUMNS hold the token's first ones, those from TRAILING_COLUMNS_START on the rest.
    source_column = tl.where(
        c < spec.TRAILING_COLUMNS_START, c, c - spec.TRAILING_COLUMNS_START + spec.NUM_LEADING_COLUMNS
    )
    is_token_column = (
        ((c < spec.NUM_LEADING_COLUMNS) | (c >= spec.TRAILING_COLUMNS_START))
        & (source_column < spec.D)
        & (tl.zeros_like(c) + head < spec.HK)
    )
    token_offsets = (
        tl.cast(first_row + r, tl.int64)[:, None] * (spec.HK * spec.D) + (head * spec.D + source_column)[None, :]
    )
    mask = valid[:, None] & is_token_column[None, :]
    if spec.KV_COMPONENTS == 2:
        # A combined cache: a program writes keys or values, so one of the two loads is fully masked.
        is_key = tl.zeros_like(c)[None, :] + component == 0
        from_values = tl.load(values + token_offsets, mask=mask & ~is_key, other=0.0)
        x = tl.where(is_key, tl.load(keys + token_offsets, mask=mask & is_key, other=0.0), from_values)
    else:
        x = tl.load(keys + token_offsets, mask=mask, other=0.0)
    head_offset = (
        batch * spec.CACHE_BATCH_STRIDE + head * spec.PAGE_SLOT_HEAD_STRIDES[2] + component * spec.CACHE_ROW_WIDTH
    )
    # Padding columns are stored as 0. Each slot belongs to one token, so no two programs write to the same slot.
    tl.store(
        pages + head_offset + slot_offsets[:, None] + c[None, :],
        x,
        mask=valid[:, None] & (c < spec.CACHE_ROW_WIDTH)[None, :],
    )
