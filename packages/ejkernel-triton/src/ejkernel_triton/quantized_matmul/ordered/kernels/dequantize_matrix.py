"""Dequantises a packed matrix [R, W] of words to memory, [R, W * CODES_PER_WORD], in the matrix's order."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.quantized_matmul.kernels.dequantize import compute_scale_and_offset, load_scales
from ejkernel_triton.quantized_matmul.ordered.kernels.dequantize_words import dequantize_words


@triton.jit
def dequantize_matrix_kernel(packed, scales, zero_points, nf4_table, matrix, spec: tl.constexpr, per: tl.constexpr):
    """Dequantises a tile [BLOCK_R, BLOCK_W] of words.

    Weights have the bits that `ordered_matmul_kernel` multiplies: both call `dequantize_words`.
    """
    NUM_WORD_TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    NUM_ROW_TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    COLUMNS: tl.constexpr = spec.W * spec.CODES_PER_WORD
    program = tl.program_id(0)
    batch = tl.cast(program // (NUM_WORD_TILES * NUM_ROW_TILES), tl.int64)
    tile = program % NUM_WORD_TILES
    r = program // NUM_WORD_TILES % NUM_ROW_TILES * spec.BLOCK_R + tl.arange(0, spec.BLOCK_R)
    words = tile * spec.BLOCK_W + tl.arange(0, spec.BLOCK_W)
    packed = batch_row_address(packed, batch, per.PACKED, spec.R * spec.W)
    scales = batch_row_address(scales, batch, per.SCALES, spec.R * spec.SCALES_PER_ROW)
    if spec.CODES_ARE_INTEGERS and not spec.SHARED_ZERO_POINT:
        zero_points = batch_row_address(zero_points, batch, per.ZERO_POINTS, spec.R * spec.SCALES_PER_ROW)
    mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
    words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(tl.int32, bitcast=True)
    stored_scales, stored_zeros = load_scales(scales, zero_points, r, tile, spec)
    scale, offset = compute_scale_and_offset(stored_scales, stored_zeros, spec)
    weights = dequantize_words(words_tile, scale, offset, nf4_table, spec)
    columns = tile * (spec.BLOCK_W * spec.CODES_PER_WORD) + tl.arange(0, spec.BLOCK_W * spec.CODES_PER_WORD)
    # The address of a row has 64 bits: the matrix may have more than 2^31 elements.
    rows = matrix + batch * spec.R * COLUMNS + (tl.cast(r, tl.int64) * COLUMNS)[:, None]
    tl.store(rows + columns[None, :], weights, mask=(r < spec.R)[:, None] & (columns < COLUMNS)[None, :])
