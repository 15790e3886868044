"""Gather-reduce: both passes gather, and are memory-bound.

    gather_sum_kernel      a program has BLOCK_T tokens and BLOCK_D channels: loads a row per index, and adds them
                           in float32
    gather_bwd_kernel      the same for rows: loads a cotangent per pair of a row; the dot product of the two is the
                           gradient of the pair's weight, of which a program computes the share of its channels
    scatter_copies_kernel  if every token is a copy of one row: a program loads BLOCK_T rows once, and stores them
                           for each token with their index; further programs store zeros for tokens without
                           a row

Sums are computed in registers in a fixed order: without atomics, results are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.gather_reduce.kernels.tile import load_rows_by_index, locate_program


@triton.jit
def add_weighted_row(acc, n, token, rows, indices, weights, channels, spec: tl.constexpr):
    """Adds the n-th row of each token to its sum."""
    index = tl.load(indices + token * spec.K + n, mask=token < spec.T, other=-1)
    valid = (index >= 0) & (index < spec.R)
    row_values = load_rows_by_index(rows, index, valid, channels, spec)
    if spec.HAS_WEIGHTS:
        # Not loaded for an index out of range, so that a NaN in its weight does not matter.
        row_values *= tl.load(weights + token * spec.K + n, mask=valid, other=0.0).to(tl.float32)[:, None]
    return acc + row_values


@triton.jit
def gather_sum_kernel(rows, indices, weights, output, spec: tl.constexpr, per: tl.constexpr):
    """Computes the sums of BLOCK_T tokens."""
    K: tl.constexpr = spec.K
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    row, _, token, channels = locate_program(spec)
    rows = batch_row_address(rows, row, per.ROWS, spec.R * spec.D)
    indices = batch_row_address(indices, row, per.INDICES, spec.T * spec.K)
    if spec.HAS_WEIGHTS:
        weights = batch_row_address(weights, row, per.WEIGHTS, spec.T * spec.K)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if spec.UNROLL_TERMS:
        for n in tl.static_range(K):
            acc = add_weighted_row(acc, n, token, rows, indices, weights, channels, spec)
    else:
        for n in tl.range(K):
            acc = add_weighted_row(acc, n, token, rows, indices, weights, channels, spec)
    output_pointers = output + (row * spec.T + token)[:, None] * spec.D + channels[None, :]
    mask = (token < spec.T)[:, None] & (channels < spec.D)[None, :]
    tl.store(output_pointers, acc.to(output.dtype.element_ty), mask=mask)
