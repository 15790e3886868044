"""Copies rows to tokens if each token is a copy of one row; see `gather_sum`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def scatter_copies_kernel(rows, indices, inverse_indices, output, spec: tl.constexpr, per: tl.constexpr):
    """Copies BLOCK_T rows to their tokens, or fills those of ZERO_FILL_BLOCK_TOKENS tokens that have no row."""
    tile = tl.program_id(0) % spec.NUM_CHANNEL_TILES
    block = tl.program_id(0) // spec.NUM_CHANNEL_TILES % (spec.NUM_BLOCKS + spec.NUM_ZERO_FILL_BLOCKS)
    batch = tl.cast(
        tl.program_id(0) // (spec.NUM_CHANNEL_TILES * (spec.NUM_BLOCKS + spec.NUM_ZERO_FILL_BLOCKS)), tl.int64
    )
    channels = tile * spec.BLOCK_D + tl.arange(0, spec.BLOCK_D)
    rows = batch_row_address(rows, batch, per.ROWS, spec.R * spec.D)
    indices = batch_row_address(indices, batch, per.INDICES, spec.T)
    inverse_indices = batch_row_address(inverse_indices, batch, per.INVERSE_INDICES, spec.R * spec.M)
    output += batch * spec.T * spec.D
    if block < spec.NUM_BLOCKS:
        copy_rows(rows, inverse_indices, output, block, channels, spec)
    else:
        zero_tokens_without_row(indices, output, block - spec.NUM_BLOCKS, channels, spec)


@triton.jit
def copy_rows(rows, inverse_indices, output, block, channels, spec: tl.constexpr):
    """Stores BLOCK_T rows to all tokens with their index."""
    M: tl.constexpr = spec.M
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    row_ids = block * BLOCK_T + tl.arange(0, BLOCK_T)
    in_row = (channels < spec.D)[None, :]
    row_pointers = rows + tl.cast(row_ids, tl.int64)[:, None] * spec.D + channels[None, :]
    loaded_rows = tl.load(row_pointers, mask=(row_ids < spec.R)[:, None] & in_row, other=0.0)
    if spec.UNROLL_TERMS:
        for n in tl.static_range(M):
            copy_rows_to_nth_token(loaded_rows, n, row_ids, inverse_indices, output, channels, spec)
    else:
        for n in tl.range(M):
            copy_rows_to_nth_token(loaded_rows, n, row_ids, inverse_indices, output, channels, spec)


@triton.jit
def copy_rows_to_nth_token(loaded_rows, n, row_ids, inverse_indices, output, channels, spec: tl.constexpr):
    """Stores each of `loaded_rows`, which have the indices `row_ids`, to the n-th of its tokens."""
    token = tl.load(inverse_indices + row_ids * spec.M + n, mask=row_ids < spec.R, other=-1)
    valid = (token >= 0) & (token < spec.T)
    output_pointers = output + tl.cast(token, tl.int64)[:, None] * spec.D + channels[None, :]
    tl.store(output_pointers, loaded_rows, mask=valid[:, None] & (channels < spec.D)[None, :])


@triton.jit
def zero_tokens_without_row(indices, output, block, channels, spec: tl.constexpr):
    """Stores zeros for those of ZERO_FILL_BLOCK_TOKENS tokens that have no row."""
    ZERO_FILL_BLOCK_TOKENS: tl.constexpr = spec.ZERO_FILL_BLOCK_TOKENS
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    STEP_TOKENS: tl.constexpr = spec.ZERO_FILL_STEP_TOKENS
    first_token = block * ZERO_FILL_BLOCK_TOKENS
    token = first_token + tl.arange(0, ZERO_FILL_BLOCK_TOKENS)
    index = tl.load(indices + token, mask=token < spec.T, other=0)
    # On one device all tokens usually have a row, so the loop is skipped.
    if tl.max(((index < 0) | (index >= spec.R)).to(tl.int32), axis=0) > 0:
        for start in tl.range(0, ZERO_FILL_BLOCK_TOKENS, STEP_TOKENS):
            empty_tokens = first_token + start + tl.arange(0, STEP_TOKENS)
            row_index = tl.load(indices + empty_tokens, mask=empty_tokens < spec.T, other=0)
            has_no_row = (row_index < 0) | (row_index >= spec.R)
            output_pointers = output + tl.cast(empty_tokens, tl.int64)[:, None] * spec.D + channels[None, :]
            zeros = tl.zeros([STEP_TOKENS, BLOCK_D], output.dtype.element_ty)
            tl.store(output_pointers, zeros, mask=has_no_row[:, None] & (channels < spec.D)[None, :])
