"""Computes sums over the rows of each group: the gradients of the matrices.

    program: one tile [BLOCK_OUTPUT_ROWS, BLOCK_OUTPUT_COLUMNS] of one matrix
    rows of the group, BLOCK_K per step:  left_rows^T [BLOCK_OUTPUT_ROWS, BLOCK_K] x right_rows  ->  acc  ->  output

A program adds the rows of its group in order, so results are reproducible bit for bit. An empty group's programs store
zeros. Programs are not persistent: groups differ in length, and the hardware starts the next program on a
multiprocessor as soon as one ends.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, swizzled_tile_index
from ejkernel_triton.grouped_matmul.kernels.tile import tile_indices_and_mask


@triton.jit
def load_group_bounds(group_row_bounds, matrix_index):
    """Returns the first row of a matrix's group and the row after its last."""
    return tl.load(group_row_bounds + matrix_index * 2), tl.load(group_row_bounds + matrix_index * 2 + 1)


@triton.jit
def grouped_gemm_drhs_kernel(left_rows, right_rows, group_row_bounds, output, spec: tl.constexpr, per: tl.constexpr):
    """Computes a tile [BLOCK_OUTPUT_ROWS, BLOCK_OUTPUT_COLUMNS] of `left_rows^T right_rows` over one group's rows."""
    BLOCK_OUTPUT_ROWS: tl.constexpr = spec.BLOCK_OUTPUT_ROWS
    BLOCK_OUTPUT_COLUMNS: tl.constexpr = spec.BLOCK_OUTPUT_COLUMNS
    num_row_tiles: tl.constexpr = (spec.OUTPUT_ROWS + BLOCK_OUTPUT_ROWS - 1) // BLOCK_OUTPUT_ROWS
    num_column_tiles: tl.constexpr = (spec.OUTPUT_COLUMNS + BLOCK_OUTPUT_COLUMNS - 1) // BLOCK_OUTPUT_COLUMNS
    program = tl.program_id(0)
    batch = tl.cast(program // (spec.NUM_MATRICES * num_row_tiles * num_column_tiles), tl.int64)
    program = program % (spec.NUM_MATRICES * num_row_tiles * num_column_tiles)
    matrix_index = program // (num_row_tiles * num_column_tiles)
    # Tiles of a matrix are in groups of GROUP_M rows, so that programs that run together share rows in L2.
    tile_p, tile_q = swizzled_tile_index(
        program % (num_row_tiles * num_column_tiles), num_row_tiles, num_column_tiles, spec.GROUP_M
    )
    left_rows = batch_row_address(left_rows, batch, per.LEFT_ROWS, spec.ROWS * spec.OUTPUT_ROWS)
    right_rows = batch_row_address(right_rows, batch, per.RIGHT_ROWS, spec.ROWS * spec.OUTPUT_COLUMNS)
    group_row_bounds = batch_row_address(group_row_bounds, batch, per.GROUP_ROW_BOUNDS, spec.NUM_MATRICES * 2)
    output += batch * spec.NUM_MATRICES * spec.OUTPUT_ROWS * spec.OUTPUT_COLUMNS
    output += tl.cast(matrix_index, tl.int64) * (spec.OUTPUT_ROWS * spec.OUTPUT_COLUMNS)
    first, end = load_group_bounds(group_row_bounds, matrix_index)
    p, p_mask = tile_indices_and_mask(tile_p * BLOCK_OUTPUT_ROWS, BLOCK_OUTPUT_ROWS, spec.OUTPUT_ROWS)
    q, q_mask = tile_indices_and_mask(tile_q * BLOCK_OUTPUT_COLUMNS, BLOCK_OUTPUT_COLUMNS, spec.OUTPUT_COLUMNS)
    k = tl.arange(0, spec.BLOCK_K)
    # The address of the group's first row has 64 bits, offsets within a step 32.
    left_rows += tl.cast(first, tl.int64) * spec.OUTPUT_ROWS + (k[:, None] * spec.OUTPUT_ROWS + p[None, :])
    right_rows += tl.cast(first, tl.int64) * spec.OUTPUT_COLUMNS + (k[:, None] * spec.OUTPUT_COLUMNS + q[None, :])
    acc = tl.zeros([BLOCK_OUTPUT_ROWS, BLOCK_OUTPUT_COLUMNS], tl.float32)
    for start in tl.range(first, end, spec.BLOCK_K):
        # Both operands are masked past the group's last row: a 0 in only one would be multiplied by NaN of another
        # group.
        group_mask = (k < end - start)[:, None]
        left_tile = tl.load(left_rows, mask=group_mask & p_mask[None, :], other=0.0)
        right_tile = tl.load(right_rows, mask=group_mask & q_mask[None, :], other=0.0)
        # P is contiguous in memory. The product reads 16-bit operands transposed from shared memory, without a copy.
        acc = add_dot(acc, tl.trans(left_tile), right_tile, spec)
        left_rows += spec.BLOCK_K * spec.OUTPUT_ROWS
        right_rows += spec.BLOCK_K * spec.OUTPUT_COLUMNS
    at = output + (p[:, None] * spec.OUTPUT_COLUMNS + q[None, :])
    tl.store(at, acc.to(output.dtype.element_ty), mask=p_mask[:, None] & q_mask[None, :])
