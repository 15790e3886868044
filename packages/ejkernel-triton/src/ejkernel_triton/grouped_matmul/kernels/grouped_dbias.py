"""Computes sums over the rows of each group: the gradients of the biases."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.grouped_matmul.kernels.grouped_gemm_drhs import load_group_bounds
from ejkernel_triton.grouped_matmul.kernels.tile import tile_indices_and_mask


@triton.jit
def grouped_dbias_kernel(cotangent, group_row_bounds, output, spec: tl.constexpr, per: tl.constexpr):
    """Sums BLOCK_OUTPUT_COLUMNS columns of the cotangent over the rows of one group."""
    num_column_tiles: tl.constexpr = (spec.OUTPUT_COLUMNS + spec.BLOCK_OUTPUT_COLUMNS - 1) // spec.BLOCK_OUTPUT_COLUMNS
    program = tl.program_id(0)
    batch = tl.cast(program // (spec.NUM_MATRICES * num_column_tiles), tl.int64)
    matrix_index = program // num_column_tiles % spec.NUM_MATRICES
    cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.ROWS * spec.OUTPUT_COLUMNS)
    group_row_bounds = batch_row_address(group_row_bounds, batch, per.GROUP_ROW_BOUNDS, spec.NUM_MATRICES * 2)
    output += batch * spec.NUM_MATRICES * spec.OUTPUT_COLUMNS
    first, end = load_group_bounds(group_row_bounds, matrix_index)
    q, q_mask = tile_indices_and_mask(
        (program % num_column_tiles) * spec.BLOCK_OUTPUT_COLUMNS, spec.BLOCK_OUTPUT_COLUMNS, spec.OUTPUT_COLUMNS
    )
    k = tl.arange(0, spec.BLOCK_K)
    # One partial sum per row of the step: threads add to their own elements, and are reduced once after the loop.
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    BLOCK_OUTPUT_COLUMNS: tl.constexpr = spec.BLOCK_OUTPUT_COLUMNS
    acc = tl.zeros([BLOCK_K, BLOCK_OUTPUT_COLUMNS], tl.float32)
    at = cotangent + tl.cast(first, tl.int64) * spec.OUTPUT_COLUMNS + (k[:, None] * spec.OUTPUT_COLUMNS + q[None, :])
    for start in tl.range(first, end, spec.BLOCK_K):
        group_mask = (k < end - start)[:, None] & q_mask[None, :]
        acc += tl.load(at, mask=group_mask, other=0.0).to(tl.float32)
        at += spec.BLOCK_K * spec.OUTPUT_COLUMNS
    tl.store(output + matrix_index * spec.OUTPUT_COLUMNS + q, tl.sum(acc, 0), mask=q_mask)
