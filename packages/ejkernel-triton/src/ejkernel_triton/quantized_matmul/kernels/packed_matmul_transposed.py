"""Multiplies with the transposed packed matrix; see `packed_matmul`."""

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
def packed_matmul_transposed_kernel(
    x, packed, scales, zero_points, nf4_table, split_sums, spec: tl.constexpr, per: tl.constexpr
):
    """Multiplies x, permuted by code [CODES_PER_WORD, M, W], by the transposed matrix: partial sums [NUM_SPLITS, 1, M,
    R].
    """
    NUM_COLUMN_TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    CONTRACTED_TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    TILES_PER_SPLIT: tl.constexpr = (CONTRACTED_TILES + spec.NUM_SPLITS - 1) // spec.NUM_SPLITS
    M: tl.constexpr = spec.BLOCK_M
    N: tl.constexpr = spec.BLOCK_R
    CODES_PER_WORD: tl.constexpr = spec.CODES_PER_WORD
    batch, split_index, column, row = locate_program(tl.program_id(0), NUM_COLUMN_TILES, spec)
    x = batch_row_address(x, batch, per.X, spec.CODES_PER_WORD * spec.M * spec.W)
    packed = batch_row_address(packed, batch, per.PACKED, spec.R * spec.W)
    scales = batch_row_address(scales, batch, per.SCALES, spec.R * spec.SCALES_PER_ROW)
    if spec.CODES_ARE_INTEGERS and not spec.SHARED_ZERO_POINT:
        zero_points = batch_row_address(zero_points, batch, per.ZERO_POINTS, spec.R * spec.SCALES_PER_ROW)
    split_sums += (batch * spec.NUM_SPLITS + split_index) * (spec.M * spec.R)
    m = row * M + tl.arange(0, M)
    r = column * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    # Prologue: loads the scales of the first tile.
    stored_scales, stored_zeros = load_scales(scales, zero_points, r, split_index * TILES_PER_SPLIT, spec)
    for tile in tl.range(
        split_index * TILES_PER_SPLIT, tl.minimum(split_index * TILES_PER_SPLIT + TILES_PER_SPLIT, CONTRACTED_TILES)
    ):
        words = tile * spec.BLOCK_W + tl.arange(0, spec.BLOCK_W)
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        scale, offset = compute_scale_and_offset(stored_scales, stored_zeros, spec)
        # Loads the scales of the next tile in advance, as in `packed_matmul`.
        stored_scales, stored_zeros = load_scales(scales, zero_points, r, tile + 1, spec)
        for code_index in tl.static_range(CODES_PER_WORD):
            # x is permuted by code, so column j of this tile belongs to code `code_index` of word j.
            at = x + (code_index * spec.M + m)[:, None] * spec.W + words[None, :]
            x_tile = tl.load(at, mask=(m < spec.M)[:, None] & (words < spec.W)[None, :], other=0.0)
            # The contracted axis is that of words, so the weights are the transposed right operand.
            acc = add_dot(
                acc, x_tile, tl.trans(dequantize_code(words_tile, scale, offset, nf4_table, code_index, spec)), spec
            )
    store_split_sum(split_sums, acc, 0, m, r, spec.R, spec)
