"""Computes the index of packed sequences' chunks: all tables of `plan.ChunkIndex` in one launch.

XLA would run six kernels one after the other, among them a sort. Here each program reads all sequences, and computes
the entries of a few chunks: 2 microseconds (docs/lab/linear_recurrence_gpu.md).
"""

import triton
import triton.language as tl


@triton.jit
def chunk_index_kernel(
    cu_seqlens,
    bounds,
    first_chunks,
    starts,
    ends,
    order,
    per: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes ENTRIES entries of each table; PADDED is a power of two above SEQUENCES. See `plan.make_chunk_index`."""
    PROGRAMS: tl.constexpr = (max(CHUNKS, SEQUENCES + 2) + ENTRIES - 1) // ENTRIES
    program = tl.program_id(0)
    row = program // PROGRAMS
    cu_seqlens += (row // per.CU_SEQLENS) * (SEQUENCES + 1)
    sequence = tl.arange(0, PADDED)
    # Indices past the last sequence stand for empty sequences at its end: they have no chunks.
    first = tl.load(cu_seqlens + tl.minimum(sequence, SEQUENCES))
    last = tl.load(cu_seqlens + tl.minimum(sequence + 1, SEQUENCES))
    counts = (last - first + (CHUNK - 1)) // CHUNK
    after = tl.cumsum(counts, 0)
    before = after - counts
    entry = (program % PROGRAMS) * ENTRIES + tl.arange(0, ENTRIES)
    # One sequence has the chunk, or none if it is past the last chunk: the sums have at most one nonzero term.
    its = (before[None, :] <= entry[:, None]) & (entry[:, None] < after[None, :])
    start = tl.sum(tl.where(its, first[None, :] + (entry[:, None] - before[None, :]) * CHUNK, 0), 1)
    end = tl.sum(tl.where(its, last[None, :], 0), 1)
    tl.store(starts + row * CHUNKS + entry, start, mask=entry < CHUNKS)
    tl.store(ends + row * CHUNKS + entry, end, mask=entry < CHUNKS)
    at_entry = tl.load(cu_seqlens + tl.minimum(entry, SEQUENCES))
    tl.store(bounds + row * (SEQUENCES + 2) + entry, at_entry, mask=entry < SEQUENCES + 2)
    earlier = tl.sum(tl.where(sequence[None, :] < entry[:, None], counts[None, :], 0), 1)
    tl.store(first_chunks + row * (SEQUENCES + 1) + entry, earlier, mask=entry < SEQUENCES + 1)
    # The rank of a sequence is the number of longer ones, and of earlier ones of the same length.
    count = (tl.load(cu_seqlens + tl.minimum(entry + 1, SEQUENCES)) - at_entry + (CHUNK - 1)) // CHUNK
    same = (counts[None, :] == count[:, None]) & (sequence[None, :] < entry[:, None])
    longer = (counts[None, :] > count[:, None]) | same
    place = tl.sum((longer & (sequence < SEQUENCES)[None, :]).to(tl.int32), 1)
    tl.store(order + row * SEQUENCES + place, entry, mask=entry < SEQUENCES)
