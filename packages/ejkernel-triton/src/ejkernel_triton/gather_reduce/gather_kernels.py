# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Gather-reduce: both passes gather and are bound by memory.

    sums_kernel        a program has BLOCK_T tokens and BLOCK_D channels: loads a row for every index, adds in float32
    gradients_kernel   the same for rows: loads a cotangent for every pair of a row; the dot product of the two is the
                       gradient of the pair's weight, of which a program has the part of its channels

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
