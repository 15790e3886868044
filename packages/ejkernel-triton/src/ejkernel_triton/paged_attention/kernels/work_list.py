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

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.paged_attention.kernels.tile import (
    CONTEXT_LEN_FIELD,
    FIELDS_PER_ENTRY,
    FIRST_KEY_TILE_FIELD,
    FIRST_POSITION_FIELD,
    FIRST_ROW_FIELD,
    KEY_END_FIELD,
    KEY_START_FIELD,
    NUM_KEY_TILES_FIELD,
    NUM_ROWS_FIELD,
    SEQUENCE_FIELD,
)


@triton.jit
def maximum(a, b):
    """Returns the maximum of two values."""
    return tl.maximum(a, b)


@triton.jit
def compute_key_range(key_start, position, rows, context_end, spec: tl.constexpr):
    """Returns the first key and the end of the keys of tiles of query rows, as `paged_work` defines them."""
    key_end = tl.minimum(context_end, spec.MAX_KV_LEN)
    # With positions per row, the entry's own position has no meaning.
    if not spec.LOAD_ROW_POSITIONS:
        if spec.WINDOW_LEFT is not None:
            key_start = tl.maximum(key_start, position - spec.WINDOW_LEFT)
        if spec.WINDOW_RIGHT is not None:
            key_end = tl.minimum(key_end, position + rows + spec.WINDOW_RIGHT)
        if spec.CHUNK_SIZE is not None:
            last_position = position + rows - 1
            key_start = tl.maximum(key_start, position // spec.CHUNK_SIZE * spec.CHUNK_SIZE)
            key_end = tl.minimum(
                key_end, tl.where(last_position < 0, 0, (last_position // spec.CHUNK_SIZE + 1) * spec.CHUNK_SIZE)
            )
    key_start = tl.maximum(key_start, 0)
    return key_start, tl.where(rows > 0, tl.maximum(key_end, key_start), key_start)


@triton.jit
def work_list_kernel(
    kv_lens,
    query_start,
    kv_starts,
    num_seqs,
    work_list,
    program_shares,
    spec: tl.constexpr,
    per: tl.constexpr,
    PADDED_NUM_SEQUENCES: tl.constexpr,
    PADDED_NUM_ENTRIES: tl.constexpr,
    PADDED_NUM_PROGRAMS: tl.constexpr,
):
    """Computes the entries and the shares of one batch row."""
    batch = tl.cast(tl.program_id(0), tl.int64)
    kv_lens = batch_row_address(kv_lens, batch, per.KV_LENS, spec.NUM_SEQUENCES)
    work_list = work_list + batch * spec.NUM_ENTRIES * FIELDS_PER_ENTRY
    program_shares = program_shares + batch * (spec.NUM_PROGRAMS + 1) * 2
    n = tl.arange(0, PADDED_NUM_SEQUENCES)
    w = tl.arange(0, PADDED_NUM_ENTRIES)
    p = tl.arange(0, PADDED_NUM_PROGRAMS)
    entry_in_bounds = w < spec.NUM_ENTRIES
    entry_address = work_list + w * FIELDS_PER_ENTRY
    if spec.HAS_QUERY_START:
        query_start = batch_row_address(query_start, batch, per.QUERY_START, spec.NUM_SEQUENCES + 1)
        valid = n < spec.NUM_SEQUENCES
        if spec.HAS_NUM_SEQS:
            # Sequences past the live ones have no rows: their lengths are ignored.
            valid = valid & (n < tl.load(batch_row_address(num_seqs, batch, per.NUM_SEQS, 1)))
        first_row = tl.load(query_start + n, mask=valid, other=0)
        rows_per_sequence = tl.maximum(tl.load(query_start + n + 1, mask=valid, other=0) - first_row, 0)
        tiles_per_sequence = (rows_per_sequence + spec.BLOCK_Q - 1) // spec.BLOCK_Q
        # Entries: sequence n has those from ends - tiles_of to ends. The first one gets n; others stay 0.
        entry_ends = tl.cumsum(tiles_per_sequence, 0)
        num_entries = tl.sum(tiles_per_sequence, 0)
        tl.store(entry_address + SEQUENCE_FIELD, tl.zeros_like(w), mask=entry_in_bounds)
        # Barrier: a zero that another thread stores late would overwrite a mark.
        tl.debug_barrier()
        tl.store(
            work_list + (entry_ends - tiles_per_sequence) * FIELDS_PER_ENTRY + SEQUENCE_FIELD,
            n + 1,
            mask=tiles_per_sequence > 0,
        )
        # Barrier: entries are read by other threads than those that marked them.
        tl.debug_barrier()
        sequence_marks = tl.load(entry_address + SEQUENCE_FIELD, mask=entry_in_bounds, other=0)
        # Barrier: stores below overwrite the marks, which other threads may not have read yet.
        tl.debug_barrier()
        # Indices increase with entries, so a running maximum continues each to the next mark. Marks are n + 1; 0 is
        # none.
        sequence = tl.maximum(tl.associative_scan(sequence_marks, 0, maximum) - 1, 0)
        # The same scan gives the first entry of the sequence, and so the number of its earlier tiles.
        earlier_rows = (w - tl.associative_scan(tl.where(sequence_marks > 0, w, 0), 0, maximum)) * spec.BLOCK_Q
        row = tl.load(query_start + sequence, mask=entry_in_bounds, other=0)
        num_sequence_rows = tl.load(query_start + sequence + 1, mask=entry_in_bounds, other=0) - row
        rows = tl.where(w < num_entries, tl.minimum(num_sequence_rows - earlier_rows, spec.BLOCK_Q), 0)
    else:
        # Decoding: sequence, entry and query row have the same index.
        sequence, earlier_rows, row, num_sequence_rows = w, tl.zeros_like(w), w, tl.zeros_like(w) + 1
        rows = tl.where(entry_in_bounds, 1, 0)
    kv_len = tl.load(kv_lens + sequence, mask=entry_in_bounds, other=0)
    # The queries are the last tokens of the context.
    position = kv_len - num_sequence_rows + earlier_rows
    key_start = tl.zeros_like(w)
    if spec.HAS_KV_STARTS:
        kv_starts = batch_row_address(kv_starts, batch, per.KV_STARTS, spec.NUM_SEQUENCES)
        key_start = tl.load(kv_starts + sequence, mask=entry_in_bounds, other=0)
    key_start, key_end = compute_key_range(key_start, position, rows, kv_len, spec)
    num_spanned_tiles = (key_end + spec.BLOCK_KV - 1) // spec.BLOCK_KV - key_start // spec.BLOCK_KV
    # An entry without keys gets one empty tile: its program stores the zeros of its output.
    tiles_per_head = tl.where(rows > 0, tl.maximum(tl.where(key_end > key_start, num_spanned_tiles, 0), 1), 0)
    entry_tile_end = tl.cumsum(tiles_per_head * spec.HK, 0)
    entry_tile_start = entry_tile_end - tiles_per_head * spec.HK
    tl.store(entry_address + SEQUENCE_FIELD, sequence, mask=entry_in_bounds)
    tl.store(entry_address + FIRST_ROW_FIELD, row + earlier_rows, mask=entry_in_bounds)
    tl.store(entry_address + NUM_ROWS_FIELD, rows, mask=entry_in_bounds)
    tl.store(entry_address + FIRST_POSITION_FIELD, position, mask=entry_in_bounds)
    tl.store(entry_address + CONTEXT_LEN_FIELD, position - earlier_rows, mask=entry_in_bounds)
    tl.store(entry_address + KEY_START_FIELD, key_start, mask=entry_in_bounds)
    tl.store(entry_address + KEY_END_FIELD, key_end, mask=entry_in_bounds)
    tl.store(entry_address + FIRST_KEY_TILE_FIELD, entry_tile_start, mask=entry_in_bounds)
    tl.store(entry_address + NUM_KEY_TILES_FIELD, tiles_per_head, mask=entry_in_bounds)
    # Shares: all key tiles, split equally. At least one tile each, since it is a divisor below.
    total_tiles = tl.sum(tiles_per_head * spec.HK, 0)
    tiles_per_share = tl.maximum((total_tiles + spec.NUM_PROGRAMS - 1) // spec.NUM_PROGRAMS, 1)
    program_in_bounds = p < spec.NUM_PROGRAMS
    tl.store(program_shares + p * 2, tl.zeros_like(p), mask=program_in_bounds)
    # Barrier: as above, zeros before marks.
    tl.debug_barrier()
    # The first program whose share starts in the entry, if any.
    first_program = (entry_tile_start + tiles_per_share - 1) // tiles_per_share
    tl.store(
        program_shares + first_program * 2,
        w,
        mask=entry_in_bounds & (tiles_per_head > 0) & (first_program * tiles_per_share < entry_tile_end),
    )
    # Barrier: as above, marks before reads.
    tl.debug_barrier()
    entry_of_program = tl.associative_scan(tl.load(program_shares + p * 2, mask=program_in_bounds, other=0), 0, maximum)
    # Barrier: every mark is read before the stores below overwrite it.
    tl.debug_barrier()
    tl.store(program_shares + p * 2, entry_of_program, mask=program_in_bounds)
    tl.store(program_shares + p * 2 + 1, tl.minimum(p * tiles_per_share, total_tiles), mask=program_in_bounds)
    tl.store(program_shares + spec.NUM_PROGRAMS * 2, tiles_per_share)
    tl.store(program_shares + spec.NUM_PROGRAMS * 2 + 1, total_tiles)
