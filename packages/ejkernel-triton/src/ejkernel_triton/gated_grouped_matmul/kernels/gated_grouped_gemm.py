"""The first product of an expert layer: gathers rows while multiplying, and applies the gate in the epilogue.

    tokens [T, C] --- index of a row ---> lhs tile --+
    matrix [C, 2F]: columns of the gate   -> rhs tile -+-> acc of both + bias: g and u -> act(g) u -> rows [M, F]
                    columns of the values -> rhs tile -+

Neither the gathered rows [M, C] nor the products [M, 2F] are stored: a token is read from L2 once per expert that it
has. Persistent programs, groups of tile rows and the tile list are those of `grouped_gemm_kernel`.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, swizzled_tile_index, tanh
from ejkernel_triton.grouped_matmul.kernels.tile import (
    END_ROW_FIELD,
    FIELDS_PER_ENTRY,
    FIRST_ROW_FIELD,
    MATRIX_INDEX_FIELD,
    tile_indices_and_mask,
)


@triton.jit
def multiply_tile(tokens, rhs, bias, token_ids, matrix_index, column, spec: tl.constexpr):
    """Returns a tile's products, with the bias: [BLOCK_M, 2 BLOCK_N] of gate and values, [BLOCK_M, BLOCK_N] without a
    gate. Row m of the tile is token `token_ids[m]`.
    """
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    EVEN_K: tl.constexpr = spec.CONTRACTED_SIZE % BLOCK_K == 0
    WIDTH: tl.constexpr = BLOCK_N if spec.GATE_LAYOUT == "no gate" else 2 * BLOCK_N
    MATRIX_COLUMNS: tl.constexpr = spec.COLUMNS if spec.GATE_LAYOUT == "no gate" else 2 * spec.COLUMNS
    # Multiplies both halves at once, which reads lhs from shared memory only once: its bandwidth is the bottleneck.
    at = tl.arange(0, WIDTH)
    if spec.GATE_LAYOUT == "halves":
        n = column + at % BLOCK_N
        matrix_column = at // BLOCK_N * spec.COLUMNS + n
    elif spec.GATE_LAYOUT == "interleaved":
        n = column + at // 2
        matrix_column = 2 * column + at
    else:
        n = column + at
        matrix_column = n
    column_mask = n < spec.COLUMNS
    k = tl.arange(0, BLOCK_K)
    # The address of a token's row has 64 bits: tokens of one tile may be far apart.
    lhs_pointers = tokens + (tl.cast(token_ids, tl.int64) * spec.CONTRACTED_SIZE)[:, None] + k[None, :]
    rhs_pointers = rhs + tl.cast(matrix_index, tl.int64) * (spec.CONTRACTED_SIZE * MATRIX_COLUMNS)
    rhs_pointers += k[:, None] * spec.RHS_STRIDES[0] + (matrix_column * spec.RHS_STRIDES[1])[None, :]
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    num_steps: tl.constexpr = (spec.CONTRACTED_SIZE + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, num_steps):
        if EVEN_K and spec.COLUMNS % BLOCK_N == 0:
            lhs_tile = tl.load(lhs_pointers)
            rhs_tile = tl.load(rhs_pointers)
        else:
            # Both operands are 0 past the end: a 0 in only one would be multiplied by out-of-bounds data, which may be
            # NaN.
            k_mask = k < spec.CONTRACTED_SIZE - step * BLOCK_K
            lhs_tile = tl.load(lhs_pointers, mask=k_mask[None, :], other=0.0)
            rhs_tile = tl.load(rhs_pointers, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
        acc = add_dot(acc, lhs_tile, rhs_tile, spec)
        lhs_pointers += BLOCK_K
        rhs_pointers += BLOCK_K * spec.RHS_STRIDES[0]
    if spec.HAS_BIAS:
        bias_columns = tl.load(bias + matrix_index * MATRIX_COLUMNS + matrix_column, mask=column_mask, other=0.0)
        acc += bias_columns.to(tl.float32)[None, :]
    return acc


@triton.jit
def apply_gate(acc, spec: tl.constexpr):
    """Returns the outputs of the finished products `acc` of a tile, [BLOCK_M, BLOCK_N]. Each thread has the columns of
    both the gate and the values, so the split moves no data.
    """
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    if spec.GATE_LAYOUT == "no gate":
        return apply_activation(acc, spec)
    else:
        if spec.GATE_LAYOUT == "interleaved":
            gate, values = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        else:
            gate, values = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        if spec.CLAMP_LIMIT is not None:
            gate = tl.minimum(gate, spec.CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
            values = tl.minimum(values, spec.CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
            values = tl.maximum(values, -spec.CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return apply_activation(gate, spec) * (values + spec.BETA if spec.BETA != 0.0 else values)


@triton.jit
def apply_activation(gate, spec: tl.constexpr):
    """Returns silu with the factor ALPHA in its sigmoid, gelu by its tanh formula, or the squared ReLU."""
    if spec.ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-spec.ALPHA * gate))
    elif spec.ACTIVATION == "gelu":
        tanh_argument = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        return 0.5 * gate * (1.0 + tanh(tanh_argument, False))
    else:
        relu = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return relu * relu


@triton.jit
def store_output_tile(output_tile, output, row, end, column, spec: tl.constexpr):
    """Stores the rows of a tile of outputs before `end`. The tile of the next group stores the later rows."""
    m = tl.arange(0, spec.BLOCK_M)
    n, column_mask = tile_indices_and_mask(column, spec.BLOCK_N, spec.COLUMNS)
    at = tl.cast(row, tl.int64) * spec.COLUMNS + (m[:, None] * spec.COLUMNS + n[None, :])
    mask = (m < end - row)[:, None] & column_mask[None, :]
    tl.store(output + at, output_tile.to(output.dtype.element_ty), mask=mask)


@triton.jit
def compute_and_store_tile(tokens, rhs, bias, row_tokens, output, matrix_index, row, end, column, spec: tl.constexpr):
    """Computes and stores a tile of the gated output."""
    # Rows past the last one repeat it, so that loads stay in bounds; they are not stored.
    token = row + tl.minimum(tl.arange(0, spec.BLOCK_M), spec.ROWS - 1 - row)
    if spec.GATHERS_ROWS:
        token = tl.load(row_tokens + token)
    has_token = (token >= 0) & (token < spec.NUM_TOKENS)
    acc = multiply_tile(tokens, rhs, bias, tl.where(has_token, token, 0), matrix_index, column, spec)
    # A row without a token is 0, even if token 0, which is read for it, is NaN.
    output_tile = tl.where(has_token[:, None], apply_gate(acc, spec), 0.0)
    store_output_tile(output_tile, output, row, end, column, spec)


@triton.jit
def gated_grouped_gemm_kernel(tokens, rhs, bias, row_tokens, tile_list, output, spec: tl.constexpr, per: tl.constexpr):
    """Computes every NUM_PROGRAMS-th tile.

    `tile_list` has the entries, then three counts: leading entries without a matrix, entries with one, all entries.
    """
    program = tl.program_id(0)
    batch = tl.cast(program // spec.NUM_PROGRAMS, tl.int64)
    program = program % spec.NUM_PROGRAMS
    tokens = batch_row_address(tokens, batch, per.TOKENS, spec.NUM_TOKENS * spec.CONTRACTED_SIZE)
    MATRIX_COLUMNS: tl.constexpr = spec.COLUMNS if spec.GATE_LAYOUT == "no gate" else 2 * spec.COLUMNS
    rhs = batch_row_address(rhs, batch, per.RHS, spec.NUM_MATRICES * spec.CONTRACTED_SIZE * MATRIX_COLUMNS)
    if spec.HAS_BIAS:
        bias = batch_row_address(bias, batch, per.BIAS, spec.NUM_MATRICES * MATRIX_COLUMNS)
    if spec.GATHERS_ROWS:
        row_tokens = batch_row_address(row_tokens, batch, per.ROW_TOKENS, spec.ROWS)
    tile_list = batch_row_address(tile_list, batch, per.TILE_LIST, (spec.TILE_LIST_LENGTH + 1) * FIELDS_PER_ENTRY)
    output += batch * spec.ROWS * spec.COLUMNS
    counts_address = tile_list + spec.TILE_LIST_LENGTH * FIELDS_PER_ENTRY
    num_leading, num_assigned, num_entries = (
        tl.load(counts_address),
        tl.load(counts_address + 1),
        tl.load(counts_address + 2),
    )
    columns: tl.constexpr = (spec.COLUMNS + spec.BLOCK_N - 1) // spec.BLOCK_N
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    # Unassigned rows are 0.
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(program, (num_entries - num_assigned) * columns, spec.NUM_PROGRAMS):
        entry = tile // columns
        entry_address = tile_list + (entry + tl.where(entry < num_leading, 0, num_assigned)) * FIELDS_PER_ENTRY
        row, end = tl.load(entry_address + FIRST_ROW_FIELD), tl.load(entry_address + END_ROW_FIELD)
        store_output_tile(zeros, output, row, end, (tile % columns) * BLOCK_N, spec)
    for tile in tl.range(program, num_assigned * columns, spec.NUM_PROGRAMS):
        entry, column = swizzled_tile_index(tile, num_assigned, columns, spec.GROUP_M)
        entry_address = tile_list + (num_leading + entry) * FIELDS_PER_ENTRY
        matrix_index, row, end = (
            tl.load(entry_address + MATRIX_INDEX_FIELD),
            tl.load(entry_address + FIRST_ROW_FIELD),
            tl.load(entry_address + END_ROW_FIELD),
        )
        column *= spec.BLOCK_N
        compute_and_store_tile(tokens, rhs, bias, row_tokens, output, matrix_index, row, end, column, spec)
