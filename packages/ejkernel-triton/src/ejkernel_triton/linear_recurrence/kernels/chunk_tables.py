"""Computes the index of packed sequences' chunks: all tables of `plan.ChunkTables` in one launch.

XLA would run six kernels one after the other, among them a sort. Here each program reads all sequences, and computes
the entries of a few chunks: 2 microseconds (docs/lab/linear_recurrence_gpu.md).
"""

import triton
import triton.language as tl


@triton.jit
def chunk_tables_kernel(
    cu_seqlens,
    padded_cu_seqlens,
    chunk_offsets,
    chunk_starts,
    sequence_ends,
    sequences_by_length,
    per: tl.constexpr,
    NUM_SEQUENCES: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    ENTRIES_PER_PROGRAM: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
):
    """Writes ENTRIES_PER_PROGRAM entries of each table; PADDED_SEQUENCES is a power of two above NUM_SEQUENCES. See
    `plan.make_chunk_tables`.
    """
    NUM_PROGRAMS: tl.constexpr = (max(NUM_CHUNKS, NUM_SEQUENCES + 2) + ENTRIES_PER_PROGRAM - 1) // ENTRIES_PER_PROGRAM
    program = tl.program_id(0)
    row = program // NUM_PROGRAMS
    cu_seqlens += (row // per.CU_SEQLENS) * (NUM_SEQUENCES + 1)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    # Indices past the last sequence stand for empty sequences at its end: they have no chunks.
    sequence_start = tl.load(cu_seqlens + tl.minimum(sequence, NUM_SEQUENCES))
    sequence_end = tl.load(cu_seqlens + tl.minimum(sequence + 1, NUM_SEQUENCES))
    chunks_per_sequence = (sequence_end - sequence_start + (CHUNK_SIZE - 1)) // CHUNK_SIZE
    sequence_end_chunk = tl.cumsum(chunks_per_sequence, 0)
    sequence_first_chunk = sequence_end_chunk - chunks_per_sequence
    entry = (program % NUM_PROGRAMS) * ENTRIES_PER_PROGRAM + tl.arange(0, ENTRIES_PER_PROGRAM)
    # One sequence has the chunk, or none if it is past the last chunk: the sums have at most one nonzero term.
    contains_chunk = (sequence_first_chunk[None, :] <= entry[:, None]) & (entry[:, None] < sequence_end_chunk[None, :])
    chunk_start = tl.sum(
        tl.where(
            contains_chunk, sequence_start[None, :] + (entry[:, None] - sequence_first_chunk[None, :]) * CHUNK_SIZE, 0
        ),
        1,
    )
    chunk_end = tl.sum(tl.where(contains_chunk, sequence_end[None, :], 0), 1)
    tl.store(chunk_starts + row * NUM_CHUNKS + entry, chunk_start, mask=entry < NUM_CHUNKS)
    tl.store(sequence_ends + row * NUM_CHUNKS + entry, chunk_end, mask=entry < NUM_CHUNKS)
    entry_bound = tl.load(cu_seqlens + tl.minimum(entry, NUM_SEQUENCES))
    tl.store(padded_cu_seqlens + row * (NUM_SEQUENCES + 2) + entry, entry_bound, mask=entry < NUM_SEQUENCES + 2)
    num_earlier_chunks = tl.sum(tl.where(sequence[None, :] < entry[:, None], chunks_per_sequence[None, :], 0), 1)
    tl.store(chunk_offsets + row * (NUM_SEQUENCES + 1) + entry, num_earlier_chunks, mask=entry < NUM_SEQUENCES + 1)
    # The rank of a sequence is the number of longer ones, and of earlier ones of the same length.
    entry_num_chunks = (
        tl.load(cu_seqlens + tl.minimum(entry + 1, NUM_SEQUENCES)) - entry_bound + (CHUNK_SIZE - 1)
    ) // CHUNK_SIZE
    is_earlier_of_same_length = (chunks_per_sequence[None, :] == entry_num_chunks[:, None]) & (
        sequence[None, :] < entry[:, None]
    )
    precedes_entry = (chunks_per_sequence[None, :] > entry_num_chunks[:, None]) | is_earlier_of_same_length
    rank = tl.sum((precedes_entry & (sequence < NUM_SEQUENCES)[None, :]).to(tl.int32), 1)
    tl.store(sequences_by_length + row * NUM_SEQUENCES + rank, entry, mask=entry < NUM_SEQUENCES)
