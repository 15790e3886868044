"""Multiplies few rows with a packed matrix, and contracts in the matrix's order, without a split.

    packed words (num_stages copies in flight) -> shift, mask, scale in registers -> codes in the matrix's order
                                               -> shared memory -> MMA, one accumulator

`packed_matmul_kernel` leaves codes in the order of their shifts, which saves the way through shared memory, and splits
the contracted axis over programs. Here a row has the sum that one product with the dequantised matrix gives it, so both
can serve calls in a `batch_invariant` block: elements are added 16 at a time, from the first to the last.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address
from ejkernel_triton.quantized_matmul.kernels.dequantize import compute_scale_and_offset, load_scales
from ejkernel_triton.quantized_matmul.ordered.kernels.dequantize_words import dequantize_words


@triton.jit
def ordered_matmul_kernel(x, packed, scales, zero_points, nf4_table, output, spec: tl.constexpr, per: tl.constexpr):
    """Multiplies x [M, K] by the packed matrix, [K, N] in its rows or, with TRANSPOSED, [N, K]: outputs [M, N]."""
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    TILE_COLUMNS: tl.constexpr = spec.BLOCK_W * spec.CODES_PER_WORD
    N: tl.constexpr = spec.R if spec.TRANSPOSED else spec.W * spec.CODES_PER_WORD
    K: tl.constexpr = spec.W * spec.CODES_PER_WORD if spec.TRANSPOSED else spec.R
    TILE_N: tl.constexpr = spec.BLOCK_R if spec.TRANSPOSED else TILE_COLUMNS
    TILE_K: tl.constexpr = TILE_COLUMNS if spec.TRANSPOSED else spec.BLOCK_R
    NUM_ROW_TILES: tl.constexpr = (spec.M + BLOCK_M - 1) // BLOCK_M
    NUM_COLUMN_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    program = tl.program_id(0)
    batch = tl.cast(program // (NUM_ROW_TILES * NUM_COLUMN_TILES), tl.int64)
    column = program // NUM_ROW_TILES % NUM_COLUMN_TILES
    x = batch_row_address(x, batch, per.X, spec.M * K)
    packed = batch_row_address(packed, batch, per.PACKED, spec.R * spec.W)
    scales = batch_row_address(scales, batch, per.SCALES, spec.R * spec.SCALES_PER_ROW)
    if spec.CODES_ARE_INTEGERS and not spec.SHARED_ZERO_POINT:
        zero_points = batch_row_address(zero_points, batch, per.ZERO_POINTS, spec.R * spec.SCALES_PER_ROW)
    m = program % NUM_ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    # Addresses of rows have 64 bits: x and the output may have more than 2^31 elements.
    x_rows, output_rows = x + (tl.cast(m, tl.int64) * K)[:, None], output + ((batch * spec.M + m) * N)[:, None]
    in_tile_r, in_tile_w = tl.arange(0, spec.BLOCK_R), tl.arange(0, spec.BLOCK_W)
    acc = tl.zeros([BLOCK_M, TILE_N], tl.float32)
    # Prologue: loads the scales of the first tile.
    if spec.TRANSPOSED:
        stored_scales, stored_zeros = load_scales(scales, zero_points, column * spec.BLOCK_R + in_tile_r, 0, spec)
    else:
        stored_scales, stored_zeros = load_scales(scales, zero_points, in_tile_r, column, spec)
    for step in tl.range(0, (K + TILE_K - 1) // TILE_K):
        r = (column if spec.TRANSPOSED else step) * spec.BLOCK_R + in_tile_r
        word_tile = step if spec.TRANSPOSED else column
        words = word_tile * spec.BLOCK_W + in_tile_w
        k = step * TILE_K + tl.arange(0, TILE_K)
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        x_tile = tl.load(x_rows + k[None, :], mask=(m < spec.M)[:, None] & (k < K)[None, :], other=0.0)
        scale, offset = compute_scale_and_offset(stored_scales, stored_zeros, spec)
        # Loads the scales of the next tile in advance, as in `packed_matmul`.
        if spec.TRANSPOSED:
            stored_scales, stored_zeros = load_scales(scales, zero_points, r, word_tile + 1, spec)
        else:
            stored_scales, stored_zeros = load_scales(scales, zero_points, r + spec.BLOCK_R, word_tile, spec)
        weights = dequantize_words(words_tile, scale, offset, nf4_table, spec)
        if spec.TRANSPOSED:
            weights = tl.trans(weights)
        acc = add_dot(acc, x_tile, weights, spec)
    n = column * TILE_N + tl.arange(0, TILE_N)
    tl.store(output_rows + n[None, :], acc.to(output.dtype.element_ty), mask=(m < spec.M)[:, None] & (n < N)[None, :])
