"""Computes cumulative log-decay inside of chunks."""

import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.kernels.tile import chunk_span, powers_of_two


@triton.jit
def chunk_local_cumsum_kernel(
    decay,
    starts,
    ends,
    cumulative,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes sums of log2 gates from each chunk's first token on: [rows, T, H, WIDTH] to
    [rows, H, CHUNKS * CHUNK, WIDTH].

    Gates are clamped to at least 2 ** -58: a smaller one would erase the state in float32 as well, and with the bound
    sums are finite and keep their digits. T is 1 for a decay that is the same for all tokens.
    """
    # The gates of all heads and channels of a token are contiguous: tiles are parts of that row, across heads.
    COLUMNS: tl.constexpr = spec.H * spec.WIDTH
    TILES: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    column = (program % TILES) * BLOCK
    program = program // TILES
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, BLOCK)
    step = 0 if T == 1 else COLUMNS
    first = tl.cast(row // per.DECAY, tl.int64) * (T * COLUMNS)
    first += tl.cast(start, tl.int64) * step
    valid = (start + rows < end)[:, None] & (columns < COLUMNS)[None, :]
    # A log gate of 0 for tokens past the end: the sum of the last token is repeated to the end of the chunk.
    gates = tl.load(decay + first + (rows[:, None] * step + columns[None, :]), mask=valid, other=0.0)
    sums = tl.cumsum(powers_of_two(gates), 0)
    head = columns // spec.WIDTH
    if spec.CHUNKS * spec.CHUNK * COLUMNS > 2**31:
        # A tile spans heads, which are a sequence apart: only here does the offset of an element take 64 bits.
        head = head.to(tl.int64)
    at = head[None, :] * (spec.CHUNKS * spec.CHUNK) + chunk * spec.CHUNK + rows[:, None]
    at = at * spec.WIDTH + (columns % spec.WIDTH)[None, :]
    target = cumulative + tl.cast(row, tl.int64) * (spec.CHUNKS * spec.CHUNK * COLUMNS)
    # No mask on rows: every row of the chunk is written, so that loads need no mask.
    tl.store(target + at, sums, mask=(columns < COLUMNS)[None, :])
