"""Computes the gradients of rows and weights; see `gather_sum`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch
from ejkernel_triton.gather_reduce.kernels.tile import load_rows, program_tile


@triton.jit
def add_cotangent(acc, n, owner, values, cotangent, inverse, weights, shares, channels, spec: tl.constexpr):
    """Adds the n-th pair of each row to the rows' gradients, and stores the channels' share of the weight's
    gradient.
    """
    pair = tl.load(inverse + owner * spec.M + n, mask=owner < spec.R, other=-1)
    valid = (pair >= 0) & (pair < spec.T * spec.K)
    term = load_rows(cotangent, pair // spec.K, valid, channels, spec)
    if spec.DOTS:
        # Each pair belongs to one row, so no two programs of a tile store to the same address.
        tl.store(shares + pair, tl.sum(values * term, axis=1), mask=valid)
    if spec.WEIGHTS:
        term *= tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    return acc + term


@triton.jit
def gather_bwd_kernel(cotangent, inverse, weights, rows, gradient, shares, spec: tl.constexpr, per: tl.constexpr):
    """Computes the gradients of BLOCK_T rows and, if DOTS, those of the weights of their pairs, [TILES, T * K]
    float32.
    """
    M: tl.constexpr = spec.M
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    row, tile, owner, channels = program_tile(spec)
    cotangent = at_batch(cotangent, row, per.COTANGENT, spec.T * spec.D)
    inverse = at_batch(inverse, row, per.INVERSE, spec.R * spec.M)
    if spec.WEIGHTS:
        weights = at_batch(weights, row, per.WEIGHTS, spec.T * spec.K)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    values = acc
    if spec.DOTS:
        rows = at_batch(rows, row, per.ROWS, spec.R * spec.D)
        values = load_rows(rows, owner, owner < spec.R, channels, spec)
        shares += (row * spec.TILES + tile) * (spec.T * spec.K)
    if spec.UNROLL:
        for n in tl.static_range(M):
            acc = add_cotangent(acc, n, owner, values, cotangent, inverse, weights, shares, channels, spec)
    else:
        for n in tl.range(M):
            acc = add_cotangent(acc, n, owner, values, cotangent, inverse, weights, shares, channels, spec)
    target = gradient + (row * spec.R + owner)[:, None] * spec.D + channels[None, :]
    mask = (owner < spec.R)[:, None] & (channels < spec.D)[None, :]
    tl.store(target, acc.to(gradient.dtype.element_ty), mask=mask)
