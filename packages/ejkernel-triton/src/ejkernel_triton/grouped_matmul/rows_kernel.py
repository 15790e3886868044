# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Rows times the matrix of their group: the forward pass, and the gradient of lhs with the matrices transposed.

    tile list      0  1  2 | 3 | 4  5 | 6 ...        tiles of rows; | where the group changes
    columns   0    p0 p1 p2  p3  p4 p5  p6 p7        a band of tiles of rows goes down first: the programs that run
              1    p8 p9 ..                          together share matrices along a row of this picture, and rows of
              2    ..                                lhs along a column, in L2
             ...
    the next band of tiles of rows

A program is persistent: it takes tile p, then p + PROGRAMS, and so on until the list ends, whose length is read from
memory. Rows after a tile's group are multiplied too, and not stored: another tile owns them, and a row of a product is
of no other row, so whatever they hold, NaN too, does no harm. So the main loop has no masks.

Source: Gale et al. 2022, arXiv:2211.15841 (block-sparse products of a dropless mixture of experts).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, at_batch, grouped_tile
from ejkernel_triton.grouped_matmul.operands import END, FIELDS, MATRIX, ROW, bounded, operand


@triton.jit
def scaled(tile, scale, matrix, c, n, spec: tl.constexpr):
    """A tile of a matrix as it is multiplied with; each element has its scale where scales differ over C."""
    if spec.SCALES == "elements":
        at = (c // spec.PER_SCALE[0])[:, None] * spec.SCALE_STRIDES[0]
        n = tl.minimum(n, spec.COLUMNS - 1)
        at += (n // spec.PER_SCALE[1])[None, :] * spec.SCALE_STRIDES[1]
        factors = tl.load(scale + tl.cast(matrix, tl.int64) * spec.SCALE_ELEMENTS + at)
        return operand(tile.to(tl.float32) * factors, spec)
    else:
        return operand(tile, spec)


@triton.jit
def add_bytes(acc, a, b, lhs_scale, rhs_scale, step, spec: tl.constexpr):
    """acc + a b of 8 bits, which meet as they are; a step has one scale for each row, and one for each column."""
    if spec.WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if spec.LHS_SCALES == "steps" or spec.SCALES == "steps":
        part = tl.dot(a, b)
        if spec.LHS_SCALES == "steps":
            part *= tl.load(lhs_scale + step * spec.BLOCK_K * spec.LHS_BLOCKS // spec.CONTRACTED)[:, None]
        if spec.SCALES == "steps":
            part *= tl.load(rhs_scale + step * spec.BLOCK_K // spec.PER_SCALE[0] * spec.SCALE_STRIDES[0])[None, :]
        return acc + part
    else:
        return tl.dot(a, b, acc, max_num_imprecise_acc=spec.IMPRECISE)


@triton.jit
def product(lhs, rhs, lhs_scale, scale, matrix, row, column, spec: tl.constexpr):
    """Accumulator [BLOCK_M, BLOCK_N] of a tile of rows and columns."""
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    EVEN: tl.constexpr = spec.CONTRACTED % BLOCK_K == 0
    # The rows of the last tile that lhs does not have are its last row again: nothing is read behind the array.
    m = tl.minimum(tl.arange(0, BLOCK_M), spec.ROWS - 1 - row)
    n, in_columns = bounded(column, BLOCK_N, spec.COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # 64 bits for where the operands begin, 32 for where an element is in a tile: 64-bit offsets take registers.
    left = lhs + tl.cast(row, tl.int64) * spec.CONTRACTED + (m[:, None] * spec.CONTRACTED + k[None, :])
    right = rhs + tl.cast(matrix, tl.int64) * (spec.CONTRACTED * spec.COLUMNS)
    right += k[:, None] * spec.RHS_STRIDES[0] + n[None, :] * spec.RHS_STRIDES[1]
    if spec.LHS_SCALES != "no":
        of_rows = lhs_scale + (tl.cast(row, tl.int64) + m) * spec.LHS_BLOCKS
        of_columns = scale + tl.cast(matrix, tl.int64) * spec.SCALE_ELEMENTS + tl.minimum(n, spec.COLUMNS - 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps: tl.constexpr = (spec.CONTRACTED + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, steps):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right, mask=in_columns[None, :], other=0.0) if spec.COLUMNS % BLOCK_N else tl.load(right)
            c = step * BLOCK_K + k
        else:
            there = k < spec.CONTRACTED - step * BLOCK_K
            a = tl.load(left, mask=there[None, :], other=0.0)
            b = tl.load(right, mask=there[:, None] & in_columns[None, :], other=0.0)
            c = tl.minimum(step * BLOCK_K + k, spec.CONTRACTED - 1)
        if spec.LHS_SCALES == "no":
            acc = add_dot(acc, operand(a, spec), scaled(b, scale, matrix, c, n, spec), spec)
        else:
            acc = add_bytes(acc, a, b, of_rows, of_columns, step, spec)
        left += BLOCK_K
        right += BLOCK_K * spec.RHS_STRIDES[0]
    return acc


@triton.jit
def store(acc, lhs_scale, scale, bias, existing, output, matrix, row, end, column, spec: tl.constexpr):
    """The epilogue: scales of rows and columns, bias, `existing_out`; stores the rows of the tile's own group."""
    n, in_columns = bounded(column, spec.BLOCK_N, spec.COLUMNS)
    matrix = tl.cast(matrix, tl.int64)
    if spec.LHS_SCALES == "rows":
        acc *= tl.load(lhs_scale + tl.minimum(row + tl.arange(0, spec.BLOCK_M), spec.ROWS - 1))[:, None]
    if spec.SCALES == "columns":
        acc *= tl.load(scale + matrix * spec.SCALE_ELEMENTS + n, mask=in_columns, other=0.0)[None, :]
    if spec.BIAS:
        acc += tl.load(bias + matrix * spec.COLUMNS + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    add_and_store(acc, existing, output, row, end, column, spec)


@triton.jit
def add_and_store(acc, existing, output, row, end, column, spec: tl.constexpr):
    """Adds `existing_out`, and stores the rows before `end`."""
    m = tl.arange(0, spec.BLOCK_M)
    n, in_columns = bounded(column, spec.BLOCK_N, spec.COLUMNS)
    at = tl.cast(row, tl.int64) * spec.COLUMNS + (m[:, None] * spec.COLUMNS + n[None, :])
    keep = (m < end - row)[:, None] & in_columns[None, :]
    if spec.EXISTING:
        acc += tl.load(existing + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=keep)


@triton.jit
def fill(existing, output, tiles, program, before, count, total, spec: tl.constexpr):
    """Rows of no group, whose entries are the first `before` and the last ones: `existing_out`, or 0."""
    columns: tl.constexpr = (spec.COLUMNS + spec.BLOCK_N - 1) // spec.BLOCK_N
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(program, (total - count) * columns, spec.PROGRAMS):
        entry = tile // columns
        own = tiles + (entry + tl.where(entry < before, 0, count)) * FIELDS
        row, end = tl.load(own + ROW), tl.load(own + END)
        add_and_store(zeros, existing, output, row, end, (tile % columns) * spec.BLOCK_N, spec)


@triton.jit
def rows_kernel(lhs, rhs, scale, lhs_scale, bias, existing, tiles, output, spec: tl.constexpr, per: tl.constexpr):
    """A program multiplies every PROGRAMS-th tile; `tiles` holds the entries, and then how many have no matrix and come
    first, how many have one, and how many there are."""
    program = tl.program_id(0)
    batch = tl.cast(program // spec.PROGRAMS, tl.int64)
    program = program % spec.PROGRAMS
    lhs = at_batch(lhs, batch, per.LHS, spec.ROWS * spec.CONTRACTED)
    rhs = at_batch(rhs, batch, per.RHS, spec.MATRICES * spec.CONTRACTED * spec.COLUMNS)
    if spec.SCALES != "no":
        scale = at_batch(scale, batch, per.SCALE, spec.MATRICES * spec.SCALE_ELEMENTS)
    if spec.LHS_SCALES != "no":
        lhs_scale = at_batch(lhs_scale, batch, per.LHS_SCALE, spec.ROWS * spec.LHS_BLOCKS)
    if spec.BIAS:
        bias = at_batch(bias, batch, per.BIAS, spec.MATRICES * spec.COLUMNS)
    if spec.EXISTING:
        existing = at_batch(existing, batch, per.EXISTING, spec.ROWS * spec.COLUMNS)
    tiles = at_batch(tiles, batch, per.TILES, (spec.ENTRIES + 1) * FIELDS)
    output += batch * spec.ROWS * spec.COLUMNS
    ends = tiles + spec.ENTRIES * FIELDS
    before, count, total = tl.load(ends), tl.load(ends + 1), tl.load(ends + 2)
    fill(existing, output, tiles, program, before, count, total, spec)
    columns: tl.constexpr = (spec.COLUMNS + spec.BLOCK_N - 1) // spec.BLOCK_N
    for tile in tl.range(program, count * columns, spec.PROGRAMS, flatten=spec.FLATTEN):
        entry, column = grouped_tile(tile, count, columns, spec.BAND)
        own = tiles + (before + entry) * FIELDS
        matrix, row, end = tl.load(own + MATRIX), tl.load(own + ROW), tl.load(own + END)
        column *= spec.BLOCK_N
        acc = product(lhs, rhs, lhs_scale, scale, matrix, row, column, spec)
        store(acc, lhs_scale, scale, bias, existing, output, matrix, row, end, column, spec)
