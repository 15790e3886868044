# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Gather-reduce: both passes gather and are bound by memory.

    sums_kernel        a program has BLOCK_T tokens and BLOCK_D channels: loads a row for every index, adds in float32
    gradients_kernel   the same for rows: loads a cotangent for every pair of a row; the dot product of the two is the
                       gradient of the pair's weight, of which a program has the part of its channels
    copies_kernel      where every token is a copy of one row: a program has BLOCK_T rows, loads them once, and stores
                       them for every token that names them; further programs store zeros for tokens that name none

Sums are made in registers in a fixed order: no atomics, so two runs give the same bits.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch


@triton.jit
def place_of(spec: tl.constexpr):
    """Batch row, sums [BLOCK_T] and channels [BLOCK_D] of this program."""
    program = tl.program_id(0)
    # Tiles of one block are neighbours: they look up the same indices.
    tile = program % spec.TILES
    block = program // spec.TILES % spec.BLOCKS
    row = tl.cast(program // (spec.TILES * spec.BLOCKS), tl.int64)
    return (
        row,
        tile,
        block * spec.BLOCK_T + tl.arange(0, spec.BLOCK_T),
        tile * spec.BLOCK_D + tl.arange(0, spec.BLOCK_D),
    )


@triton.jit
def load_rows(rows, index, valid, channels, spec: tl.constexpr):
    """[BLOCK_T, BLOCK_D] float32 of named rows; 0 where an index names none."""
    # 64 bits for where a row begins: rows of one tile may be far from each other.
    start = rows + tl.cast(index, tl.int64) * spec.D
    mask = valid[:, None] & (channels < spec.D)[None, :]
    return tl.load(start[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_row(acc, n, token, rows, indices, weights, channels, spec: tl.constexpr):
    """The sum of tokens with their n-th row added."""
    index = tl.load(indices + token * spec.K + n, mask=token < spec.T, other=-1)
    valid = (index >= 0) & (index < spec.R)
    term = load_rows(rows, index, valid, channels, spec)
    if spec.WEIGHTS:
        # Not loaded where no row is named, so that a weight of NaN there counts nothing.
        term *= tl.load(weights + token * spec.K + n, mask=valid, other=0.0).to(tl.float32)[:, None]
    return acc + term


@triton.jit
def sums_kernel(rows, indices, weights, output, spec: tl.constexpr, per: tl.constexpr):
    """The sums of BLOCK_T tokens."""
    K: tl.constexpr = spec.K
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    row, _, token, channels = place_of(spec)
    rows = at_batch(rows, row, per.ROWS, spec.R * spec.D)
    indices = at_batch(indices, row, per.INDICES, spec.T * spec.K)
    if spec.WEIGHTS:
        weights = at_batch(weights, row, per.WEIGHTS, spec.T * spec.K)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if spec.UNROLL:
        for n in tl.static_range(K):
            acc = add_row(acc, n, token, rows, indices, weights, channels, spec)
    else:
        for n in tl.range(K):
            acc = add_row(acc, n, token, rows, indices, weights, channels, spec)
    target = output + (row * spec.T + token)[:, None] * spec.D + channels[None, :]
    mask = (token < spec.T)[:, None] & (channels < spec.D)[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=mask)


@triton.jit
def add_cotangent(acc, n, owner, values, cotangent, inverse, weights, shares, channels, spec: tl.constexpr):
    """The gradient of rows with their n-th pair added; stores the part of the pair's weight."""
    pair = tl.load(inverse + owner * spec.M + n, mask=owner < spec.R, other=-1)
    valid = (pair >= 0) & (pair < spec.T * spec.K)
    term = load_rows(cotangent, pair // spec.K, valid, channels, spec)
    if spec.DOTS:
        # Every pair is one row's, so no two programs of a tile write the same place.
        tl.store(shares + pair, tl.sum(values * term, axis=1), mask=valid)
    if spec.WEIGHTS:
        term *= tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    return acc + term


@triton.jit
def gradients_kernel(cotangent, inverse, weights, rows, gradient, shares, spec: tl.constexpr, per: tl.constexpr):
    """The gradients of BLOCK_T rows, and with DOTS those of the weights of their pairs, [TILES, T * K] float32."""
    M: tl.constexpr = spec.M
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    row, tile, owner, channels = place_of(spec)
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


@triton.jit
def copies_kernel(rows, indices, inverse, output, spec: tl.constexpr, per: tl.constexpr):
    """Copies BLOCK_T rows to their tokens, or looks for tokens without a row among EMPTY_T."""
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
    """Stores BLOCK_T rows for the tokens that name them."""
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
    """Stores rows for the n-th token of each."""
    token = tl.load(inverse + owner * spec.M + n, mask=owner < spec.R, other=-1)
    valid = (token >= 0) & (token < spec.T)
    target = output + tl.cast(token, tl.int64)[:, None] * spec.D + channels[None, :]
    tl.store(target, values, mask=valid[:, None] & (channels < spec.D)[None, :])


@triton.jit
def fill_tokens(indices, output, block, channels, spec: tl.constexpr):
    """Stores zeros for the tokens among EMPTY_T that name no row."""
    EMPTY_T: tl.constexpr = spec.EMPTY_T
    BLOCK_D: tl.constexpr = spec.BLOCK_D
    STEP: tl.constexpr = spec.EMPTY_STEP
    first = block * EMPTY_T
    token = first + tl.arange(0, EMPTY_T)
    index = tl.load(indices + token, mask=token < spec.T, other=0)
    # In a layer on one device all tokens name a row, so that nothing follows.
    if tl.max(((index < 0) | (index >= spec.R)).to(tl.int32), axis=0) > 0:
        for start in tl.range(0, EMPTY_T, STEP):
            some = first + start + tl.arange(0, STEP)
            named = tl.load(indices + some, mask=some < spec.T, other=0)
            none = (named < 0) | (named >= spec.R)
            target = output + tl.cast(some, tl.int64)[:, None] * spec.D + channels[None, :]
            zeros = tl.zeros([STEP, BLOCK_D], output.dtype.element_ty)
            tl.store(target, zeros, mask=none[:, None] & (channels < spec.D)[None, :])
