"""Multiplies with the transposed packed matrix; see `matmul_over_rows`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, at_batch
from ejkernel_triton.quantized_matmul.kernels.dequantize import (
    dequantize,
    factors,
    load_scales,
    program_of,
    store_partial,
)


@triton.jit
def matmul_over_words_kernel(x, packed, scales, zeros, table, parts, spec: tl.constexpr, per: tl.constexpr):
    """Multiplies x, permuted by code [PER, M, W], by the transposed packed matrix: partial sums [SPLITS, 1, M, R]."""
    COLUMN_TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    SHARE: tl.constexpr = (TILES + spec.SPLITS - 1) // spec.SPLITS
    M: tl.constexpr = spec.BLOCK_M
    N: tl.constexpr = spec.BLOCK_R
    PER: tl.constexpr = spec.PER
    batch, part, column, row = program_of(tl.program_id(0), COLUMN_TILES, spec)
    x = at_batch(x, batch, per.X, spec.PER * spec.M * spec.W)
    packed = at_batch(packed, batch, per.PACKED, spec.R * spec.W)
    scales = at_batch(scales, batch, per.SCALES, spec.R * spec.GROUPS)
    if spec.AFFINE and not spec.CENTER:
        zeros = at_batch(zeros, batch, per.ZEROS, spec.R * spec.GROUPS)
    parts += (batch * spec.SPLITS + part) * (spec.M * spec.R)
    m = row * M + tl.arange(0, M)
    r = column * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    # Prologue: loads the scales of the first tile.
    stored, stored_zeros = load_scales(scales, zeros, r, part * SHARE, spec)
    for tile in tl.range(part * SHARE, tl.minimum(part * SHARE + SHARE, TILES)):
        words = tile * spec.BLOCK_W + tl.arange(0, spec.BLOCK_W)
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        scale, offset = factors(stored, stored_zeros, spec)
        # Loads the scales of the next tile in advance, as in `matmul_over_rows`.
        stored, stored_zeros = load_scales(scales, zeros, r, tile + 1, spec)
        for code in tl.static_range(PER):
            # x is permuted by code, so column j of this tile belongs to code `code` of word j.
            at = x + (code * spec.M + m)[:, None] * spec.W + words[None, :]
            left = tl.load(at, mask=(m < spec.M)[:, None] & (words < spec.W)[None, :], other=0.0)
            # The contracted axis is that of words, so the weights are the transposed right operand.
            acc = add_dot(acc, left, tl.trans(dequantize(words_tile, scale, offset, table, code, spec)), spec)
    store_partial(parts, acc, 0, m, r, spec.R, spec)
