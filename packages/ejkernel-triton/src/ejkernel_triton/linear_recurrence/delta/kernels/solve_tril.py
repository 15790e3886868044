"""Computes the inverse of I plus a strictly lower triangular matrix."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot

DIAGONAL_BLOCK_SIZE = tl.constexpr(16)
"""Rows of a diagonal block: the smallest side of an MMA."""


@triton.jit
def batched_inverses(blocks, spec: tl.constexpr):
    """Returns (I + L)^-1 of strictly lower blocks [BLOCKS, 16, 16], by products of one matrix per warp.

    The inverses A and D of two blocks of n rows give that of 2 n rows, whose lower left block is -D L A, with L the
    rows of D and the columns of A: 16 rows take four such steps. They contain no powers of a matrix, which lose all
    digits if keys repeat. Substitution row by row takes twice as long (docs/lab/linear_recurrence_gpu.md).

        | A^-1  0    |^-1     |  A      0 |
        | L     D^-1 |     =  | -D L A  D |
    """
    row, column = tl.arange(0, DIAGONAL_BLOCK_SIZE)[:, None], tl.arange(0, DIAGONAL_BLOCK_SIZE)[None, :]
    # Blocks of one row are the identity, so the first step needs no products.
    pair = (row >> 1) == (column >> 1)
    inverse = (row == column).to(tl.float32)[None, :, :] - tl.where(pair[None, :, :], blocks, 0.0)
    for level in tl.static_range(1, 4):
        below = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
        lower_left = tl.where(below[None, :, :], blocks, 0.0)
        inverse -= dot(dot(inverse, lower_left, spec), inverse, spec)
    return inverse


@triton.jit
def diagonal_inverses(strictly_lower, spec: tl.constexpr):
    """Returns the inverses of I plus the diagonal blocks of a strictly lower matrix: [CHUNK_SIZE, CHUNK_SIZE], 0
    elsewhere.
    """
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    BLOCKS: tl.constexpr = CHUNK // DIAGONAL_BLOCK_SIZE
    rows = tl.arange(0, CHUNK)
    in_diagonal_block = (rows // DIAGONAL_BLOCK_SIZE)[:, None] == (rows // DIAGONAL_BLOCK_SIZE)[None, :]
    # Extracts the diagonal blocks as [BLOCKS, 16, 16]: each sum over block columns has only one nonzero term.
    blocks = tl.sum(
        tl.reshape(
            tl.where(in_diagonal_block, strictly_lower, 0.0), [BLOCKS, DIAGONAL_BLOCK_SIZE, BLOCKS, DIAGONAL_BLOCK_SIZE]
        ),
        2,
    )
    inverse = batched_inverses(blocks, spec)
    # Converts back to [CHUNK_SIZE, CHUNK_SIZE], the shape of the other products.
    block_diagonal = tl.reshape(
        tl.broadcast_to(inverse[:, :, None, :], [BLOCKS, DIAGONAL_BLOCK_SIZE, BLOCKS, DIAGONAL_BLOCK_SIZE]),
        [CHUNK, CHUNK],
    )
    return tl.where(in_diagonal_block, block_diagonal, 0.0)


@triton.jit
def solve_tril(strictly_lower, spec: tl.constexpr):
    """Returns (I + lower)^-1 of a strictly lower [CHUNK_SIZE, CHUNK_SIZE] float32.

    With D the inverse of the diagonal blocks and X = D times the blocks below them, it is (I + X)^-1 D. X has no power
    beyond the number of blocks, so (I + X)^-1 = (I - X)(I + X^2)(I + X^4), of which a chunk of 64 needs two factors.
    """
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    inverse = diagonal_inverses(strictly_lower, spec)
    if CHUNK > DIAGONAL_BLOCK_SIZE:
        rows = tl.arange(0, CHUNK)
        # Factors are applied from the right, so each is one product with the current result. X ** (C / 16) is 0, so the
        # result is exact: the series ends.
        below = tl.where(
            (rows // DIAGONAL_BLOCK_SIZE)[:, None] > (rows // DIAGONAL_BLOCK_SIZE)[None, :], strictly_lower, 0.0
        )
        power = dot(inverse, below, spec)
        if CHUNK > 2 * DIAGONAL_BLOCK_SIZE:
            square = dot(power, power, spec)
            if CHUNK > 4 * DIAGONAL_BLOCK_SIZE:
                inverse += dot(dot(square, square, spec), inverse, spec)
            inverse += dot(square, inverse, spec)
        inverse -= dot(power, inverse, spec)
    return inverse
