"""Multiplies rows by the matrix of their group: the forward pass, and lhs's gradient with transposed matrices.

    tile list      0  1  2 | 3 | 4  5 | 6 ...        tiles of rows; | where the group changes
    columns   0    p0 p1 p2  p3  p4 p5  p6 p7        GROUP_M tile rows run first: programs that run together
              1    p8 p9 ..                          share matrices along a row of this picture, and rows of
              2    ..                                lhs along a column, in L2
             ...
    the next GROUP_M tile rows

Programs are persistent: program p multiplies tiles p, p + NUM_PROGRAMS, ... to the end of the list, whose length is
read from memory. A tile may extend into the rows of the next group. Those are multiplied too but not stored, since
another tile stores them. Rows of a product are independent, so NaN there does no harm, and the main loop has no masks.

    prologue            main loop over the contracted axis              epilogue
    tile p -> entry  -> lhs tile, rhs tile -> registers -> acc      ->  scales, bias, existing_out -> rows of the group
                        (num_stages copies in flight)                   (FLATTEN_LOOPS: the next tile's copies start)

Source: Gale et al. 2022, arXiv:2211.15841 (block-sparse products of a dropless mixture of experts).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, swizzled_tile_index
from ejkernel_triton.grouped_matmul.kernels.tile import (
    END_ROW_FIELD,
    FIELDS_PER_ENTRY,
    FIRST_ROW_FIELD,
    MATRIX_INDEX_FIELD,
    tile_indices_and_mask,
    to_operand_dtype,
)


@triton.jit
def dequantize_tile(tile, rhs_scale, matrix_index, c, n, spec: tl.constexpr):
    """Converts a tile of a matrix to an operand of the product, multiplied by its scales if these differ along C."""
    if spec.RHS_SCALE_MODE == "elements":
        at = (c // spec.RHS_SCALE_BLOCK[0])[:, None] * spec.RHS_SCALE_STRIDES[0]
        # Columns past the end use the last scale instead of a mask; they are not stored.
        n = tl.minimum(n, spec.COLUMNS - 1)
        at += (n // spec.RHS_SCALE_BLOCK[1])[None, :] * spec.RHS_SCALE_STRIDES[1]
        factors = tl.load(rhs_scale + tl.cast(matrix_index, tl.int64) * spec.SCALES_PER_MATRIX + at)
        return to_operand_dtype(tile.to(tl.float32) * factors, spec)
    else:
        return to_operand_dtype(tile, spec)


@triton.jit
def add_float8_product(acc, lhs_tile, rhs_tile, lhs_scale, rhs_scale, step, spec: tl.constexpr):
    """Adds a product of 8-bit operands to acc; a step has one scale per row, and one per column."""
    if spec.WIDEN_TO_FLOAT32:
        lhs_tile, rhs_tile = lhs_tile.to(tl.float32), rhs_tile.to(tl.float32)
    if spec.LHS_SCALE_MODE == "steps" or spec.RHS_SCALE_MODE == "steps":
        # The scales of a step multiply only its own product, so it needs a separate accumulator. The matrix unit waits
        # for
        # that: 427 instead of 655 TFLOP/s on an H200 (docs/lab/grouped_matmul_gpu.md).
        step_product = tl.dot(lhs_tile, rhs_tile)
        if spec.LHS_SCALE_MODE == "steps":
            step_product *= tl.load(lhs_scale + step * spec.BLOCK_K * spec.LHS_SCALES_PER_ROW // spec.CONTRACTED_SIZE)[
                :, None
            ]
        if spec.RHS_SCALE_MODE == "steps":
            step_product *= tl.load(
                rhs_scale + step * spec.BLOCK_K // spec.RHS_SCALE_BLOCK[0] * spec.RHS_SCALE_STRIDES[0]
            )[None, :]
        return acc + step_product
    else:
        # Hopper sums 8-bit products with about 14 bits; after MAX_IMPRECISE_ACC elements the sum goes to a float32
        # accumulator.
        return tl.dot(lhs_tile, rhs_tile, acc, max_num_imprecise_acc=spec.MAX_IMPRECISE_ACC)


@triton.jit
def multiply_tile(lhs, rhs, lhs_scale, rhs_scale, matrix_index, row, column, spec: tl.constexpr):
    """Returns the accumulator [BLOCK_M, BLOCK_N] of a tile."""
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    EVEN_K: tl.constexpr = spec.CONTRACTED_SIZE % BLOCK_K == 0
    # Rows past the end of lhs repeat its last row, so that loads without masks stay in bounds.
    m = tl.minimum(tl.arange(0, BLOCK_M), spec.ROWS - 1 - row)
    n, column_mask = tile_indices_and_mask(column, BLOCK_N, spec.COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # Addresses of tiles have 64 bits, offsets in them 32: 64-bit offsets take registers.
    lhs_pointers = (
        lhs + tl.cast(row, tl.int64) * spec.CONTRACTED_SIZE + (m[:, None] * spec.CONTRACTED_SIZE + k[None, :])
    )
    rhs_pointers = rhs + tl.cast(matrix_index, tl.int64) * (spec.CONTRACTED_SIZE * spec.COLUMNS)
    rhs_pointers += k[:, None] * spec.RHS_STRIDES[0] + n[None, :] * spec.RHS_STRIDES[1]
    if spec.LHS_SCALE_MODE != "no":
        row_scales = lhs_scale + (tl.cast(row, tl.int64) + m) * spec.LHS_SCALES_PER_ROW
        column_scales = (
            rhs_scale + tl.cast(matrix_index, tl.int64) * spec.SCALES_PER_MATRIX + tl.minimum(n, spec.COLUMNS - 1)
        )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # A compile-time constant, which flattened loops need.
    num_steps: tl.constexpr = (spec.CONTRACTED_SIZE + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, num_steps):
        # Main loop. There is no mask along C if steps divide it, and one along columns only if tiles do not.
        if EVEN_K:
            lhs_tile = tl.load(lhs_pointers)
            rhs_tile = (
                tl.load(rhs_pointers, mask=column_mask[None, :], other=0.0)
                if spec.COLUMNS % BLOCK_N
                else tl.load(rhs_pointers)
            )
            c = step * BLOCK_K + k
        else:
            # Both operands are 0 past the end: a 0 in only one would be multiplied by out-of-bounds data, which may be
            # NaN.
            k_mask = k < spec.CONTRACTED_SIZE - step * BLOCK_K
            lhs_tile = tl.load(lhs_pointers, mask=k_mask[None, :], other=0.0)
            rhs_tile = tl.load(rhs_pointers, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
            c = tl.minimum(step * BLOCK_K + k, spec.CONTRACTED_SIZE - 1)
        if spec.LHS_SCALE_MODE == "no":
            acc = add_dot(
                acc,
                to_operand_dtype(lhs_tile, spec),
                dequantize_tile(rhs_tile, rhs_scale, matrix_index, c, n, spec),
                spec,
            )
        else:
            acc = add_float8_product(acc, lhs_tile, rhs_tile, row_scales, column_scales, step, spec)
        lhs_pointers += BLOCK_K
        rhs_pointers += BLOCK_K * spec.RHS_STRIDES[0]
    return acc


@triton.jit
def store_output_tile(
    acc, lhs_scale, rhs_scale, bias, existing_out, output, matrix_index, row, end, column, spec: tl.constexpr
):
    """The epilogue: applies scales of rows and columns, bias and `existing_out`, and stores the rows of the tile's
    group.
    """
    n, column_mask = tile_indices_and_mask(column, spec.BLOCK_N, spec.COLUMNS)
    matrix_index = tl.cast(matrix_index, tl.int64)
    # Scales of whole rows and columns commute with the sum over C, so they multiply the accumulator once.
    if spec.LHS_SCALE_MODE == "rows":
        acc *= tl.load(lhs_scale + tl.minimum(row + tl.arange(0, spec.BLOCK_M), spec.ROWS - 1))[:, None]
    if spec.RHS_SCALE_MODE == "columns":
        acc *= tl.load(rhs_scale + matrix_index * spec.SCALES_PER_MATRIX + n, mask=column_mask, other=0.0)[None, :]
    if spec.HAS_BIAS:
        acc += tl.load(bias + matrix_index * spec.COLUMNS + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    add_existing_and_store(acc, existing_out, output, row, end, column, spec)


@triton.jit
def add_existing_and_store(acc, existing_out, output, row, end, column, spec: tl.constexpr):
    """Adds `existing_out`, and stores the rows before `end`."""
    m = tl.arange(0, spec.BLOCK_M)
    n, column_mask = tile_indices_and_mask(column, spec.BLOCK_N, spec.COLUMNS)
    at = tl.cast(row, tl.int64) * spec.COLUMNS + (m[:, None] * spec.COLUMNS + n[None, :])
    # The tile of the next group stores the rows from `end` on.
    mask = (m < end - row)[:, None] & column_mask[None, :]
    if spec.HAS_EXISTING_OUT:
        acc += tl.load(existing_out + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=mask)


@triton.jit
def fill_unassigned_rows(
    existing_out, output, tile_list, program, num_leading_entries, num_assigned_entries, num_entries, spec: tl.constexpr
):
    """Fills unassigned rows with `existing_out` or 0; their tiles are the first `num_leading_entries` entries and the
    last entries of the tile list.
    """
    columns: tl.constexpr = (spec.COLUMNS + spec.BLOCK_N - 1) // spec.BLOCK_N
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(program, (num_entries - num_assigned_entries) * columns, spec.NUM_PROGRAMS):
        entry = tile // columns
        entry_address = (
            tile_list + (entry + tl.where(entry < num_leading_entries, 0, num_assigned_entries)) * FIELDS_PER_ENTRY
        )
        row, end = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + END_ROW_FIELD)
        add_existing_and_store(zeros, existing_out, output, row, end, (tile % columns) * spec.BLOCK_N, spec)


@triton.jit
def grouped_gemm_kernel(
    lhs, rhs, rhs_scale, lhs_scale, bias, existing_out, tile_list, output, spec: tl.constexpr, per: tl.constexpr
):
    """Multiplies every NUM_PROGRAMS-th tile.

    `tile_list` has the entries, then three counts: leading entries without a matrix, entries with one, all entries.
    """
    program = tl.program_id(0)
    batch = tl.cast(program // spec.NUM_PROGRAMS, tl.int64)
    program = program % spec.NUM_PROGRAMS
    lhs = batch_row_address(lhs, batch, per.LHS, spec.ROWS * spec.CONTRACTED_SIZE)
    rhs = batch_row_address(rhs, batch, per.RHS, spec.NUM_MATRICES * spec.CONTRACTED_SIZE * spec.COLUMNS)
    if spec.RHS_SCALE_MODE != "no":
        rhs_scale = batch_row_address(rhs_scale, batch, per.RHS_SCALE, spec.NUM_MATRICES * spec.SCALES_PER_MATRIX)
    if spec.LHS_SCALE_MODE != "no":
        lhs_scale = batch_row_address(lhs_scale, batch, per.LHS_SCALE, spec.ROWS * spec.LHS_SCALES_PER_ROW)
    if spec.HAS_BIAS:
        bias = batch_row_address(bias, batch, per.BIAS, spec.NUM_MATRICES * spec.COLUMNS)
    if spec.HAS_EXISTING_OUT:
        existing_out = batch_row_address(existing_out, batch, per.EXISTING_OUT, spec.ROWS * spec.COLUMNS)
    tile_list = batch_row_address(tile_list, batch, per.TILE_LIST, (spec.TILE_LIST_LENGTH + 1) * FIELDS_PER_ENTRY)
    output += batch * spec.ROWS * spec.COLUMNS
    # The counts were computed on the device, so that one grid serves groups of any size.
    counts_address = tile_list + spec.TILE_LIST_LENGTH * FIELDS_PER_ENTRY
    num_leading_entries, num_assigned_entries, num_entries = (
        tl.load(counts_address),
        tl.load(counts_address + 1),
        tl.load(counts_address + 2),
    )
    # Unassigned rows are not multiplied, so they have a separate loop: flattened loops need a constant number of steps.
    fill_unassigned_rows(
        existing_out, output, tile_list, program, num_leading_entries, num_assigned_entries, num_entries, spec
    )
    columns: tl.constexpr = (spec.COLUMNS + spec.BLOCK_N - 1) // spec.BLOCK_N
    # Flattened loops overlap a tile's first copies with the previous epilogue. On an H200 they are faster for the
    # gradient of lhs and slower forward, 382 instead of 577 TFLOP/s (docs/lab/grouped_matmul_gpu.md).
    for tile in tl.range(program, num_assigned_entries * columns, spec.NUM_PROGRAMS, flatten=spec.FLATTEN_LOOPS):
        entry, column = swizzled_tile_index(tile, num_assigned_entries, columns, spec.GROUP_M)
        entry_address = tile_list + (num_leading_entries + entry) * FIELDS_PER_ENTRY
        matrix_index, row, end = (
            tl.load(entry_address + MATRIX_INDEX_FIELD),
            tl.load(entry_address + FIRST_ROW_FIELD),
            tl.load(entry_address + END_ROW_FIELD),
        )
        column *= spec.BLOCK_N
        acc = multiply_tile(lhs, rhs, lhs_scale, rhs_scale, matrix_index, row, column, spec)
        store_output_tile(acc, lhs_scale, rhs_scale, bias, existing_out, output, matrix_index, row, end, column, spec)
