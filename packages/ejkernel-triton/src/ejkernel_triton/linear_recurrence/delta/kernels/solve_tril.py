"""The inverse of I plus a strictly lower triangular matrix."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot

DIAGONAL = tl.constexpr(16)
"""Rows of a diagonal block: the least that an MMA takes."""


@triton.jit
def batched_inverses(blocks, spec: tl.constexpr):
    """Returns (I + L)^-1 of strictly lower blocks [BLOCKS, 16, 16], by products of a matrix a warp.

    Two inverses A and D of blocks of n rows make that of 2 n rows, whose lower left block is -D L A, with L the rows of
    D and the columns of A: 16 rows take four such steps. They have no powers of a matrix in them, which grow beyond all
    digits where keys repeat. Substitution row by row took twice as long (docs/lab/linear_recurrence_gpu.md).

        | A^-1  0    |^-1     |  A      0 |
        | L     D^-1 |     =  | -D L A  D |
    """
    row, column = tl.arange(0, DIAGONAL)[:, None], tl.arange(0, DIAGONAL)[None, :]
    # Blocks of one row are their own inverses, so the first step needs no products.
    pair = (row >> 1) == (column >> 1)
    inverse = (row == column).to(tl.float32)[None, :, :] - tl.where(pair[None, :, :], blocks, 0.0)
    for level in tl.static_range(1, 4):
        below = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
        between = tl.where(below[None, :, :], blocks, 0.0)
        inverse -= dot(dot(inverse, between, spec), inverse, spec)
    return inverse


@triton.jit
def diagonal_inverses(lower, spec: tl.constexpr):
    """Returns the inverses of I plus the diagonal blocks of a strictly lower matrix: [CHUNK, CHUNK], 0 elsewhere."""
    C: tl.constexpr = spec.CHUNK
    BLOCKS: tl.constexpr = C // DIAGONAL
    rows = tl.arange(0, C)
    same_block = (rows // DIAGONAL)[:, None] == (rows // DIAGONAL)[None, :]
    # Compacts the diagonal blocks to [BLOCKS, 16, 16]: of the sum over block columns one term is not 0.
    blocks = tl.sum(tl.reshape(tl.where(same_block, lower, 0.0), [BLOCKS, DIAGONAL, BLOCKS, DIAGONAL]), 2)
    inverse = batched_inverses(blocks, spec)
    # Back to [CHUNK, CHUNK], the shape that the other products take.
    whole = tl.reshape(tl.broadcast_to(inverse[:, :, None, :], [BLOCKS, DIAGONAL, BLOCKS, DIAGONAL]), [C, C])
    return tl.where(same_block, whole, 0.0)


@triton.jit
def solve_tril(lower, spec: tl.constexpr):
    """Returns (I + lower)^-1 of a strictly lower [CHUNK, CHUNK] float32.

    With D the inverse of the diagonal blocks and X = D times the blocks below them, it is (I + X)^-1 D. X has no power
    beyond the number of blocks, so (I + X)^-1 = (I - X)(I + X^2)(I + X^4), of which a chunk of 64 needs two factors.
    """
    C: tl.constexpr = spec.CHUNK
    inverse = diagonal_inverses(lower, spec)
    if C > DIAGONAL:
        rows = tl.arange(0, C)
        # Factors are applied from the right, so each is one product with what there is. X ** (C / 16) is 0, so the
        # result is exact: no series is cut off.
        below = tl.where((rows // DIAGONAL)[:, None] > (rows // DIAGONAL)[None, :], lower, 0.0)
        power = dot(inverse, below, spec)
        if C > 2 * DIAGONAL:
            square = dot(power, power, spec)
            if C > 4 * DIAGONAL:
                inverse += dot(dot(square, square, spec), inverse, spec)
            inverse += dot(square, inverse, spec)
        inverse -= dot(power, inverse, spec)
    return inverse
