"""Writes zeros for padding tokens of packed sequences, which no chunk contains.

It writes in place, and only to padding tokens: masking a whole array reads and writes all of it, a fifth of the time of
a packed call (docs/lab/linear_recurrence_gpu.md).
"""

import triton
import triton.language as tl


@triton.jit
def zero_padding_kernel(
    aliased_array,
    padded_cu_seqlens,
    array,
    per: tl.constexpr,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SEQUENCES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    """Writes zeros to [rows, T, WIDTH] before the first sequence's first token and after the last sequence's
    last one.

    `aliased_array` aliases `array`.
    """
    program = tl.program_id(0)
    NUM_BLOCKS: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    row = program // NUM_BLOCKS
    first_token = (program % NUM_BLOCKS) * BLOCK_T
    padded_cu_seqlens += (row // per.PADDED_CU_SEQLENS) * (NUM_SEQUENCES + 2)
    sequences_start, sequences_end = tl.load(padded_cu_seqlens), tl.load(padded_cu_seqlens + NUM_SEQUENCES)
    # Most programs have no padding tokens, and end here.
    if (first_token < sequences_start) | (first_token + BLOCK_T > sequences_end):
        tokens = first_token + tl.arange(0, BLOCK_T)
        is_padding = ((tokens < sequences_start) | (tokens >= sequences_end)) & (tokens < T)
        base = array + (tl.cast(row, tl.int64) * T + first_token) * WIDTH
        for column in tl.range(0, WIDTH, BLOCK_ELEMENTS):
            columns = column + tl.arange(0, BLOCK_ELEMENTS)
            at = base + (tl.arange(0, BLOCK_T)[:, None] * WIDTH + columns[None, :])
            zeros = tl.zeros([BLOCK_T, BLOCK_ELEMENTS], array.dtype.element_ty)
            tl.store(at, zeros, mask=is_padding[:, None] & (columns < WIDTH)[None, :])
