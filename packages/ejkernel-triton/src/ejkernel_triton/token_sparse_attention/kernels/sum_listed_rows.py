"""Adds the gradients of the entries that list each key to the key's gradient, in the order of the entries."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def sum_listed_rows_kernel(
    entry_rows,
    entries_by_key,
    key_bounds,
    earlier_sums,
    sums,
    per: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds the rows of one key and list to `sums` [S, NUM_LISTS, WIDTH], which starts as `earlier_sums`, in its memory.

    `entry_rows` is [E, NUM_LISTS, WIDTH], `entries_by_key` [NUM_LISTS, E] the entries ordered by key, and `key_bounds`
    [NUM_LISTS, S + 1] where each key's entries begin. A program has COLUMNS columns, a power of two.
    """
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    key = (program // COLUMN_TILES) % NUM_KEYS
    list_index = (program // (COLUMN_TILES * NUM_KEYS)) % NUM_LISTS
    batch = tl.cast(program // (COLUMN_TILES * NUM_KEYS * NUM_LISTS), tl.int64)
    bounds = batch_row_address(key_bounds, batch, per.KEY_BOUNDS, NUM_LISTS * (NUM_KEYS + 1))
    bounds += list_index * (NUM_KEYS + 1) + key
    begin, end = tl.load(bounds), tl.load(bounds + 1)
    if end > begin:
        entries_by_key = batch_row_address(entries_by_key, batch, per.ENTRIES_BY_KEY, NUM_LISTS * NUM_ENTRIES)
        entries_by_key += list_index * NUM_ENTRIES
        entry_rows = batch_row_address(entry_rows, batch, per.ENTRY_ROWS, NUM_ENTRIES * NUM_LISTS * WIDTH)
        columns = (program % COLUMN_TILES) * COLUMNS + tl.arange(0, COLUMNS)
        valid = columns < WIDTH
        at = sums + batch * (NUM_KEYS * NUM_LISTS * WIDTH) + columns
        at += tl.cast(key * NUM_LISTS + list_index, tl.int64) * WIDTH
        acc = tl.load(at, mask=valid, other=0.0)
        for n in tl.range(begin, end):
            row = tl.cast(tl.load(entries_by_key + n) * NUM_LISTS + list_index, tl.int64) * WIDTH
            acc += tl.load(entry_rows + row + columns, mask=valid, other=0.0).to(tl.float32)
        tl.store(at, acc, mask=valid)
