"""Writes new tokens into their pages, in place.

    new keys, values [T, HK, D]  --block table-->  page, slot  -->  pages, aliased input and output

A program writes one tile of query rows, for one head of the cache and one component (keys or values).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch
from ejkernel_triton.paged_attention.kernels.tile import FIELDS, POSITION, ROW, ROWS, SEQUENCE


@triton.jit
def cache_write_kernel(
    keys,
    values,
    work,
    tables,
    so_far,
    pages,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Writes rows of `keys` or, as the second component, of `values` to their slots according to the block tables.

    `pages` aliases `so_far`, and only slots of new tokens are written. Rows have the cache's width: its padding lanes
    and heads become 0, and so do the lanes between the two parts of a latent row.
    """
    W: tl.constexpr = spec.WIDTH
    BQ: tl.constexpr = spec.BLOCK_Q
    program = tl.program_id(0)
    component = program % spec.COMPONENTS
    head = program // spec.COMPONENTS % spec.HEADS
    entry = program // (spec.COMPONENTS * spec.HEADS) % spec.ENTRIES
    batch = tl.cast(program // (spec.COMPONENTS * spec.HEADS * spec.ENTRIES), tl.int64)
    keys = at_batch(keys, batch, per.KEYS, spec.TOKENS * spec.HK * spec.D)
    if spec.COMPONENTS == 2:
        values = at_batch(values, batch, per.VALUES, spec.TOKENS * spec.HK * spec.D)
    tables = at_batch(tables, batch, per.TABLES, spec.SEQUENCES * spec.TABLE)
    entry_at = at_batch(work, batch, per.WORK, spec.ENTRIES * FIELDS) + entry * FIELDS
    sequence, row, rows = tl.load(entry_at + SEQUENCE), tl.load(entry_at + ROW), tl.load(entry_at + ROWS)
    r = tl.arange(0, BQ)
    # Positions past the table, and entries that are no valid page index, are padding and are never written.
    position = tl.load(entry_at + POSITION) + r
    column = position // spec.PAGE_SIZE
    valid = (r < rows) & (position >= 0) & (column < spec.TABLE)
    page = tl.load(tables + sequence * spec.TABLE + column, mask=valid, other=-1)
    valid = valid & (page >= 0) & (page < spec.PAGES)
    # 64 bits: a cache may have more than 2 ** 31 elements.
    slot = tl.where(valid, position % spec.PAGE_SIZE, 0)
    at = tl.cast(tl.where(valid, page, 0), tl.int64) * spec.STRIDES[0] + slot * spec.STRIDES[1]
    c = tl.arange(0, W)
    # Columns up to SPLIT hold the token's first ones, those from SECOND on the rest.
    source = tl.where(c < spec.SECOND, c, c - spec.SECOND + spec.SPLIT)
    stored = ((c < spec.SPLIT) | (c >= spec.SECOND)) & (source < spec.D) & (tl.zeros_like(c) + head < spec.HK)
    token = tl.cast(row + r, tl.int64)[:, None] * (spec.HK * spec.D) + (head * spec.D + source)[None, :]
    mask = valid[:, None] & stored[None, :]
    if spec.COMPONENTS == 2:
        # A combined cache: a program writes keys or values, so one of the two loads is fully masked.
        is_key = tl.zeros_like(c)[None, :] + component == 0
        from_values = tl.load(values + token, mask=mask & ~is_key, other=0.0)
        x = tl.where(is_key, tl.load(keys + token, mask=mask & is_key, other=0.0), from_values)
    else:
        x = tl.load(keys + token, mask=mask, other=0.0)
    first = batch * spec.ELEMENTS + head * spec.STRIDES[2] + component * spec.LANES
    # Padding columns are stored as 0. Each slot belongs to one token, so no two programs write to the same slot.
    tl.store(pages + first + at[:, None] + c[None, :], x, mask=valid[:, None] & (c < spec.LANES)[None, :])
