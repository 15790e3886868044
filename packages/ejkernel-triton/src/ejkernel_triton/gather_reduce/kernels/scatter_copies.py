"""Copies rows to tokens if each token is a copy of one row; see `gather_sum`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch


@triton.jit
def scatter_copies_kernel(rows, indices, inverse, output, spec: tl.constexpr, per: tl.constexpr):
    """Copies BLOCK_T rows to their tokens, or fills those of EMPTY_T tokens that have no row."""
    tile = tl.program_id(0) % spec.TILES
    block = tl.program_id(0) // spec.TILES % (spec.BLOCKS + spec.EMPTY_BLOCKS)
    batch = tl.cast(tl.program_id(0) // (spec.TILES * (spec.BLOCKS + spec.EMPTY_BLOCKS)), tl.int64)
    channels = tile * spec.BLOCK_D + tl.arange(0, spec.BLOCK_D)
    rows = at_batch(rows, batch, per.ROWS, spec.R * spec.D)
    indices = at_batch(indices, batch, per.INDICES, spec.T)
    inverse = at_batch(inverse, batch, per.INVERSE, spec.R * spec.M)
    output += batch * spec.T * spec.D
    if block < spec.BLOCKS:
        copy_rows(rows, inverse, output, block, channels, spec)
    else:
        fill_tokens(indices, output, block - spec.BLOCKS, channels, spec)


@triton.jit
def copy_rows(rows, inverse, output, block, channels, spec: tl.constexpr):
    """Stores BLOCK_T rows to all tokens with their index."""
    M: tl.constexpr = spec.M
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    owner = block * BLOCK_T + tl.arange(0, BLOCK_T)
    in_row = (channels < spec.D)[None, :]
    source = rows + tl.cast(owner, tl.int64)[:, None] * spec.D + channels[None, :]
    values = tl.load(source, mask=(owner < spec.R)[:, None] & in_row, other=0.0)
    if spec.UNROLL:
        for n in tl.static_range(M):
            copy_row(values, n, owner, inverse, output, channels, spec)
    else:
        for n in tl.range(M):
            copy_row(values, n, owner, inverse, output, channels, spec)


@triton.jit
def copy_row(values, n, owner, inverse, output, channels, spec: tl.constexpr):
    """Stores each row to the n-th of its tokens."""
    token = tl.load(inverse + owner * spec.M + n, mask=owner < spec.R, other=-1)
    valid = (token >= 0) & (token < spec.T)
    target = output + tl.cast(token, tl.int64)[:, None] * spec.D + channels[None, :]
    tl.store(target, values, mask=valid[:, None] & (channels < spec.D)[None, :])


@triton.jit
def fill_tokens(indices, output, block, channels, spec: tl.constexpr):
    """Stores zeros for those of EMPTY_T tokens that have no row."""
    EMPTY_T: tl.constexpr = spec.EMPTY_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    STEP: tl.constexpr = spec.EMPTY_STEP
    first = block * EMPTY_T
    token = first + tl.arange(0, EMPTY_T)
    index = tl.load(indices + token, mask=token < spec.T, other=0)
    # On one device all tokens usually have a row, so the loop is skipped.
    if tl.max(((index < 0) | (index >= spec.R)).to(tl.int32), axis=0) > 0:
        for start in tl.range(0, EMPTY_T, STEP):
            some = first + start + tl.arange(0, STEP)
            named = tl.load(indices + some, mask=some < spec.T, other=0)
            none = (named < 0) | (named >= spec.R)
            target = output + tl.cast(some, tl.int64)[:, None] * spec.D + channels[None, :]
            zeros = tl.zeros([STEP, BLOCK_D], output.dtype.element_ty)
            tl.store(target, zeros, mask=none[:, None] & (channels < spec.D)[None, :])
