"""Multiplies with a packed matrix [R, C], C codes in W words of CODES_PER_WORD codes: codes are dequantised in
registers.

    word j of a row:   | code 8j+7 | ... | code 8j+1 | code 8j |       4 bits per code, CODES_PER_WORD = 8

No kernel restores the order of codes, which would move every element between threads. Code n of all words of a tile is
itself a tile [BLOCK_R, BLOCK_W], obtained from the words by one shift:

    packed_matmul             out[:, 8j + n] += x[:, rows] tile_n        one accumulator for each n
    packed_matmul_transposed  out[:, rows]   += x[:, 8j + n] tile_n^T    one accumulator, and a product for each n;
                                                                         x is permuted by n

    pipeline: packed words, x (num_stages copies in flight) -> shift, mask, scale in registers -> MMA -> accumulators
              scales, zeros (loaded one tile before their use)

Both kernels are split-K: each program contracts a range of the axis and stores float32 sums, which XLA adds in a fixed
order, so results are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address
from ejkernel_triton.quantized_matmul.kernels.dequantize import (
    compute_scale_and_offset,
    dequantize_code,
    load_scales,
    locate_program,
    store_split_sum,
)


@triton.jit
def packed_matmul_kernel(x, packed, scales, zero_points, nf4_table, split_sums, spec: tl.constexpr, per: tl.constexpr):
    """Multiplies x [M, R] by the packed matrix: partial sums [NUM_SPLITS, CODES_PER_WORD, M, W]."""
    NUM_COLUMN_TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    CONTRACTED_TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    TILES_PER_SPLIT: tl.constexpr = (CONTRACTED_TILES + spec.NUM_SPLITS - 1) // spec.NUM_SPLITS
    # TILES_PER_SPLIT tiles of the contracted axis per split; the last splits may have fewer or none, and store zeros.
    M: tl.constexpr = spec.BLOCK_M
    N: tl.constexpr = spec.BLOCK_W
    batch, split_index, column, row = locate_program(tl.program_id(0), NUM_COLUMN_TILES, spec)
    x = batch_row_address(x, batch, per.X, spec.M * spec.R)
    packed = batch_row_address(packed, batch, per.PACKED, spec.R * spec.W)
    scales = batch_row_address(scales, batch, per.SCALES, spec.R * spec.SCALES_PER_ROW)
    if spec.CODES_ARE_INTEGERS and not spec.SHARED_ZERO_POINT:
        zero_points = batch_row_address(zero_points, batch, per.ZERO_POINTS, spec.R * spec.SCALES_PER_ROW)
    split_sums += (batch * spec.NUM_SPLITS + split_index) * (spec.CODES_PER_WORD * spec.M * spec.W)
    m = row * M + tl.arange(0, M)
    words = column * N + tl.arange(0, N)
    # One variable per accumulator, which the loop carries. With words of 4 codes the compiler drops the last four.
    acc0 = tl.zeros([M, N], tl.float32)
    acc1, acc2, acc3, acc4, acc5, acc6, acc7 = acc0, acc0, acc0, acc0, acc0, acc0, acc0
    row_in_tile = tl.arange(0, spec.BLOCK_R)
    # Prologue: loads the scales of the first tile.
    stored_scales, stored_zeros = load_scales(
        scales, zero_points, split_index * TILES_PER_SPLIT * spec.BLOCK_R + row_in_tile, column, spec
    )
    for tile in tl.range(
        split_index * TILES_PER_SPLIT, tl.minimum(split_index * TILES_PER_SPLIT + TILES_PER_SPLIT, CONTRACTED_TILES)
    ):
        r = tile * spec.BLOCK_R + row_in_tile
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        x_tile = tl.load(
            x + m[:, None] * spec.R + r[None, :], mask=(m < spec.M)[:, None] & (r < spec.R)[None, :], other=0.0
        )
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        scale, offset = compute_scale_and_offset(stored_scales, stored_zeros, spec)
        # The scales of the next tile are loaded during this tile's products. Loaded in the step that uses them, and one
        # for every word, they made the kernel take 86.8 us instead of 29.4 (docs/lab/quantized_matmul_gpu.md).
        stored_scales, stored_zeros = load_scales(scales, zero_points, r + spec.BLOCK_R, column, spec)
        # One tile of x and one of words are the operands of all products of the step.
        acc0 = add_dot(acc0, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 0, spec), spec)
        acc1 = add_dot(acc1, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 1, spec), spec)
        acc2 = add_dot(acc2, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 2, spec), spec)
        acc3 = add_dot(acc3, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 3, spec), spec)
        if spec.CODES_PER_WORD == 8:
            acc4 = add_dot(acc4, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 4, spec), spec)
            acc5 = add_dot(acc5, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 5, spec), spec)
            acc6 = add_dot(acc6, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 6, spec), spec)
            acc7 = add_dot(acc7, x_tile, dequantize_code(words_tile, scale, offset, nf4_table, 7, spec), spec)
    store_split_sum(split_sums, acc0, 0, m, words, spec.W, spec)
    store_split_sum(split_sums, acc1, 1, m, words, spec.W, spec)
    store_split_sum(split_sums, acc2, 2, m, words, spec.W, spec)
    store_split_sum(split_sums, acc3, 3, m, words, spec.W, spec)
    if spec.CODES_PER_WORD == 8:
        store_split_sum(split_sums, acc4, 4, m, words, spec.W, spec)
        store_split_sum(split_sums, acc5, 5, m, words, spec.W, spec)
        store_split_sum(split_sums, acc6, 6, m, words, spec.W, spec)
        store_split_sum(split_sums, acc7, 7, m, words, spec.W, spec)
