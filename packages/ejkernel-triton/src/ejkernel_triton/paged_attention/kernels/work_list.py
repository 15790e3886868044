"""Computes the work list of a call and the programs' shares of it, in one launch.

`ejkernel.families.paged_attention.work` defines them; computed by XLA, they are a dozen launches, which together take a
quarter of the time of decoding 64 sequences of 2048 tokens.

    sequences   n       0     1  2     3          lengths of queries -> tiles of query rows -> first entry of each
    entries     w    0  1  2  3     4  5  6       n is scattered to its first entry; a running maximum fills the rest
    programs    p    0     1     2     3          w is too, to the first program that starts in one of its key tiles

A scatter and a scan replace the search, so one program suffices for any lengths. Barriers separate the scatter, the
loads and the stores, since threads read what others wrote.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch
from ejkernel_triton.paged_attention.kernels.tile import (
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
)


@triton.jit
def larger(a, b):
    """Returns the maximum of two values."""
    return tl.maximum(a, b)


@triton.jit
def reach(low, position, rows, context_end, spec: tl.constexpr):
    """Returns the first key and the end of the keys of tiles of query rows, as `paged_work` defines them."""
    high = tl.minimum(context_end, spec.CAPACITY)
    # With positions per row, the entry's own position has no meaning.
    if not spec.ROW_POSITIONS:
        if spec.LEFT is not None:
            low = tl.maximum(low, position - spec.LEFT)
        if spec.RIGHT is not None:
            high = tl.minimum(high, position + rows + spec.RIGHT)
        if spec.CHUNK is not None:
            last = position + rows - 1
            low = tl.maximum(low, position // spec.CHUNK * spec.CHUNK)
            high = tl.minimum(high, tl.where(last < 0, 0, (last // spec.CHUNK + 1) * spec.CHUNK))
    low = tl.maximum(low, 0)
    return low, tl.where(rows > 0, tl.maximum(high, low), low)


@triton.jit
def work_list_kernel(
    kv_lens,
    query_start,
    kv_starts,
    num_seqs,
    work,
    shares,
    spec: tl.constexpr,
    per: tl.constexpr,
    SEQUENCE_BLOCK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_BLOCK: tl.constexpr,
):
    """Computes the entries and the shares of one batch row."""
    batch = tl.cast(tl.program_id(0), tl.int64)
    kv_lens = at_batch(kv_lens, batch, per.KV_LENS, spec.SEQUENCES)
    work = work + batch * spec.ENTRIES * FIELDS
    shares = shares + batch * (spec.PROGRAMS + 1) * 2
    n = tl.arange(0, SEQUENCE_BLOCK)
    w = tl.arange(0, ENTRY_BLOCK)
    p = tl.arange(0, PROGRAM_BLOCK)
    is_entry = w < spec.ENTRIES
    entry_at = work + w * FIELDS
    if spec.PACKED:
        query_start = at_batch(query_start, batch, per.QUERY_START, spec.SEQUENCES + 1)
        valid = n < spec.SEQUENCES
        if spec.COUNTED:
            # Sequences past the live ones have no rows: their lengths are ignored.
            valid = valid & (n < tl.load(at_batch(num_seqs, batch, per.NUM_SEQS, 1)))
        first_row = tl.load(query_start + n, mask=valid, other=0)
        rows_of = tl.maximum(tl.load(query_start + n + 1, mask=valid, other=0) - first_row, 0)
        tiles_of = (rows_of + spec.BLOCK_Q - 1) // spec.BLOCK_Q
        # Entries: sequence n has those from ends - tiles_of to ends. The first one gets n; others stay 0.
        ends = tl.cumsum(tiles_of, 0)
        entries = tl.sum(tiles_of, 0)
        tl.store(entry_at + SEQUENCE, tl.zeros_like(w), mask=is_entry)
        # Barrier: a zero that another thread stores late would overwrite a mark.
        tl.debug_barrier()
        tl.store(work + (ends - tiles_of) * FIELDS + SEQUENCE, n + 1, mask=tiles_of > 0)
        # Barrier: entries are read by other threads than those that marked them.
        tl.debug_barrier()
        first_sequence = tl.load(entry_at + SEQUENCE, mask=is_entry, other=0)
        # Barrier: stores below overwrite the marks, which other threads may not have read yet.
        tl.debug_barrier()
        # Indices increase with entries, so a running maximum continues each to the next mark. Marks are n + 1; 0 is
        # none.
        sequence = tl.maximum(tl.associative_scan(first_sequence, 0, larger) - 1, 0)
        # The same scan gives the first entry of the sequence, and so the number of its earlier tiles.
        earlier_rows = (w - tl.associative_scan(tl.where(first_sequence > 0, w, 0), 0, larger)) * spec.BLOCK_Q
        row = tl.load(query_start + sequence, mask=is_entry, other=0)
        length = tl.load(query_start + sequence + 1, mask=is_entry, other=0) - row
        rows = tl.where(w < entries, tl.minimum(length - earlier_rows, spec.BLOCK_Q), 0)
    else:
        # Decoding: sequence, entry and query row have the same index.
        sequence, earlier_rows, row, length = w, tl.zeros_like(w), w, tl.zeros_like(w) + 1
        rows = tl.where(is_entry, 1, 0)
    kv_len = tl.load(kv_lens + sequence, mask=is_entry, other=0)
    # The queries are the last tokens of the context.
    position = kv_len - length + earlier_rows
    low = tl.zeros_like(w)
    if spec.STARTED:
        kv_starts = at_batch(kv_starts, batch, per.KV_STARTS, spec.SEQUENCES)
        low = tl.load(kv_starts + sequence, mask=is_entry, other=0)
    low, high = reach(low, position, rows, kv_len, spec)
    spanned = (high + spec.BLOCK_KV - 1) // spec.BLOCK_KV - low // spec.BLOCK_KV
    # An entry without keys gets one empty tile: its program stores the zeros of its output.
    tiles = tl.where(rows > 0, tl.maximum(tl.where(high > low, spanned, 0), 1), 0)
    after = tl.cumsum(tiles * spec.HK, 0)
    start = after - tiles * spec.HK
    tl.store(entry_at + SEQUENCE, sequence, mask=is_entry)
    tl.store(entry_at + ROW, row + earlier_rows, mask=is_entry)
    tl.store(entry_at + ROWS, rows, mask=is_entry)
    tl.store(entry_at + POSITION, position, mask=is_entry)
    tl.store(entry_at + CONTEXT, position - earlier_rows, mask=is_entry)
    tl.store(entry_at + LOW, low, mask=is_entry)
    tl.store(entry_at + HIGH, high, mask=is_entry)
    tl.store(entry_at + START, start, mask=is_entry)
    tl.store(entry_at + TILES, tiles, mask=is_entry)
    # Shares: all key tiles, split equally. At least one tile each, since it is a divisor below.
    total = tl.sum(tiles * spec.HK, 0)
    share = tl.maximum((total + spec.PROGRAMS - 1) // spec.PROGRAMS, 1)
    is_program = p < spec.PROGRAMS
    tl.store(shares + p * 2, tl.zeros_like(p), mask=is_program)
    # Barrier: as above, zeros before marks.
    tl.debug_barrier()
    # The first program whose share starts in the entry, if any.
    first_program = (start + share - 1) // share
    tl.store(shares + first_program * 2, w, mask=is_entry & (tiles > 0) & (first_program * share < after))
    # Barrier: as above, marks before reads.
    tl.debug_barrier()
    entry_of = tl.associative_scan(tl.load(shares + p * 2, mask=is_program, other=0), 0, larger)
    # Barrier: every mark is read before the stores below overwrite it.
    tl.debug_barrier()
    tl.store(shares + p * 2, entry_of, mask=is_program)
    tl.store(shares + p * 2 + 1, tl.minimum(p * share, total), mask=is_program)
    tl.store(shares + spec.PROGRAMS * 2, share)
    tl.store(shares + spec.PROGRAMS * 2 + 1, total)
