"""Computes the gradients of rows and weights; see `gather_sum`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.gather_reduce.kernels.tile import load_rows_by_index, locate_program


@triton.jit
def add_nth_cotangent(acc, n, row_ids, input_rows, arrays, channels, spec: tl.constexpr):
    """Adds the cotangent of each row's n-th token to the rows' gradients, and stores the channels' share of the
    gradient of that pair's weight: its product with `input_rows`, the rows themselves.
    """
    cotangent, inverse_indices, weights, weight_gradient_terms = arrays
    pair = tl.load(inverse_indices + row_ids * spec.M + n, mask=row_ids < spec.R, other=-1)
    valid = (pair >= 0) & (pair < spec.T * spec.K)
    row_values = load_rows_by_index(cotangent, pair // spec.K, valid, channels, spec)
    if spec.COMPUTE_WEIGHT_GRADIENT:
        # Each pair belongs to one row, so no two programs of a tile store to the same address.
        tl.store(weight_gradient_terms + pair, tl.sum(input_rows * row_values, axis=1), mask=valid)
    if spec.HAS_WEIGHTS:
        row_values *= tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    return acc + row_values


@triton.jit
def gather_bwd_kernel(
    cotangent,
    inverse_indices,
    weights,
    rows,
    row_gradient,
    weight_gradient_terms,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the gradients of BLOCK_T rows and, if COMPUTE_WEIGHT_GRADIENT, those of the weights of their pairs,
    [NUM_CHANNEL_TILES, T * K] float32.
    """
    M: tl.constexpr = spec.M
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    row, tile, row_ids, channels = locate_program(spec)
    cotangent = batch_row_address(cotangent, row, per.COTANGENT, spec.T * spec.D)
    inverse_indices = batch_row_address(inverse_indices, row, per.INVERSE_INDICES, spec.R * spec.M)
    if spec.HAS_WEIGHTS:
        weights = batch_row_address(weights, row, per.WEIGHTS, spec.T * spec.K)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    input_rows = acc
    if spec.COMPUTE_WEIGHT_GRADIENT:
        rows = batch_row_address(rows, row, per.ROWS, spec.R * spec.D)
        input_rows = load_rows_by_index(rows, row_ids, row_ids < spec.R, channels, spec)
        weight_gradient_terms += (row * spec.NUM_CHANNEL_TILES + tile) * (spec.T * spec.K)
    arrays = (cotangent, inverse_indices, weights, weight_gradient_terms)
    if spec.UNROLL_TERMS:
        for n in tl.static_range(M):
            acc = add_nth_cotangent(acc, n, row_ids, input_rows, arrays, channels, spec)
    else:
        for n in tl.range(M):
            acc = add_nth_cotangent(acc, n, row_ids, input_rows, arrays, channels, spec)
    output_pointers = row_gradient + (row * spec.R + row_ids)[:, None] * spec.D + channels[None, :]
    mask = (row_ids < spec.R)[:, None] & (channels < spec.D)[None, :]
    tl.store(output_pointers, acc.to(row_gradient.dtype.element_ty), mask=mask)
