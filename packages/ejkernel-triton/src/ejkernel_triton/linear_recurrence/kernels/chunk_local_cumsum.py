"""Computes cumulative log-decay inside of chunks."""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import chunk_start_and_sequence_end, to_clamped_log2_gates


@triton.jit
def chunk_local_cumsum_kernel(
    decay,
    chunk_starts,
    sequence_ends,
    gate_cumsum,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    GATES_PER_PROGRAM: tl.constexpr,
):
    """Computes sums of log2 gates from each chunk's first token on: [rows, T, H, GATE_CHANNELS] to
    [rows, H, NUM_CHUNKS * CHUNK_SIZE, GATE_CHANNELS].

    Gates are clamped to at least 2 ** -58: a smaller one would erase the state in float32 as well, and with the bound
    sums are finite and keep their digits. T is 1 for a decay that is the same for all tokens.
    """
    # The gates of all heads and channels of a token are contiguous: tiles are parts of that row, across heads.
    GATES_PER_TOKEN: tl.constexpr = spec.H * spec.GATE_CHANNELS
    NUM_TILES: tl.constexpr = (GATES_PER_TOKEN + GATES_PER_PROGRAM - 1) // GATES_PER_PROGRAM
    program = tl.program_id(0)
    column = (program % NUM_TILES) * GATES_PER_PROGRAM
    program = program // NUM_TILES
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    rows = tl.arange(0, spec.CHUNK_SIZE)
    columns = column + tl.arange(0, GATES_PER_PROGRAM)
    token_stride = 0 if T == 1 else GATES_PER_TOKEN
    gate_offset = tl.cast(row // per.DECAY, tl.int64) * (T * GATES_PER_TOKEN)
    gate_offset += tl.cast(first_token, tl.int64) * token_stride
    valid = (first_token + rows < sequence_end)[:, None] & (columns < GATES_PER_TOKEN)[None, :]
    # A log gate of 0 for tokens past the end: the sum of the last token is repeated to the end of the chunk.
    gates = tl.load(decay + gate_offset + (rows[:, None] * token_stride + columns[None, :]), mask=valid, other=0.0)
    sums = tl.cumsum(to_clamped_log2_gates(gates), 0)
    head = columns // spec.GATE_CHANNELS
    if spec.NUM_CHUNKS * spec.CHUNK_SIZE * GATES_PER_TOKEN > 2**31:
        # A tile spans heads, which are a sequence apart: only here does the offset of an element take 64 bits.
        head = head.to(tl.int64)
    offsets = head[None, :] * (spec.NUM_CHUNKS * spec.CHUNK_SIZE) + chunk * spec.CHUNK_SIZE + rows[:, None]
    offsets = offsets * spec.GATE_CHANNELS + (columns % spec.GATE_CHANNELS)[None, :]
    row_base = gate_cumsum + tl.cast(row, tl.int64) * (spec.NUM_CHUNKS * spec.CHUNK_SIZE * GATES_PER_TOKEN)
    # No mask on rows: every row of the chunk is written, so that loads need no mask.
    tl.store(row_base + offsets, sums, mask=(columns < GATES_PER_TOKEN)[None, :])
