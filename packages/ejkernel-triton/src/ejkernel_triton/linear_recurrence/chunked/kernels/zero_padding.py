"""Writes zeros for padding tokens of packed sequences, which no chunk contains.

It writes in place, and only to padding tokens: masking a whole array reads and writes all of it, a fifth of the time of
a packed call (docs/lab/linear_recurrence_gpu.md).
"""

import triton
import triton.language as tl


@triton.jit
def zero_padding_kernel(
    old,
    bounds,
    array,
    per: tl.constexpr,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes zeros to [rows, T, WIDTH] before the first sequence's first token and after the last sequence's last
    one.

    `old` aliases `array`.
    """
    program = tl.program_id(0)
    BLOCKS: tl.constexpr = (T + ROWS - 1) // ROWS
    row = program // BLOCKS
    start = (program % BLOCKS) * ROWS
    bounds += (row // per.BOUNDS) * (SEQUENCES + 2)
    first, last = tl.load(bounds), tl.load(bounds + SEQUENCES)
    # Most programs have no padding tokens, and end here.
    if (start < first) | (start + ROWS > last):
        tokens = start + tl.arange(0, ROWS)
        outside = ((tokens < first) | (tokens >= last)) & (tokens < T)
        base = array + (tl.cast(row, tl.int64) * T + start) * WIDTH
        for column in tl.range(0, WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            at = base + (tl.arange(0, ROWS)[:, None] * WIDTH + columns[None, :])
            zeros = tl.zeros([ROWS, COLUMNS], array.dtype.element_ty)
            tl.store(at, zeros, mask=outside[:, None] & (columns < WIDTH)[None, :])
