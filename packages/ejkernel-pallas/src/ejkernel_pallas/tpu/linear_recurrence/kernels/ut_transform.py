"""The UT transform of the delta rule: a unit lower triangular system (Yang et al. 2024, arXiv:2412.06464)."""

import jax
import jax.numpy as jnp

from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import ROWS_PER_REGISTER, is_split_at_level
from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot, row_and_column_indices
from ejkernel_pallas.tpu.mosaic.gradients import with_custom_gradient

ArraysPerHead = tuple[jax.Array, ...]


def _solve_fwd(
    matrices: ArraysPerHead, rhs: ArraysPerHead, keeps_float32: bool
) -> tuple[ArraysPerHead, tuple[ArraysPerHead, ArraysPerHead]]:
    inverse_matrices = invert_unit_lower(matrices, keeps_float32)
    found = tuple(dot(matrix, x, (1, 0), keeps_float32) for matrix, x in zip(inverse_matrices, rhs, strict=True))
    return found, (inverse_matrices, found)


def _solve_bwd(
    keeps_float32: bool, residuals: tuple[ArraysPerHead, ArraysPerHead], cotangents: ArraysPerHead
) -> tuple[ArraysPerHead, ArraysPerHead]:
    # Through the solution instead of the recursion: two products with the inverse, which is already computed.
    inverse_matrices, found = residuals
    row, column = row_and_column_indices(inverse_matrices[0].shape[0])
    of_rhs = tuple(
        dot(matrix, x, (0, 0), keeps_float32) for matrix, x in zip(inverse_matrices, cotangents, strict=True)
    )
    matrix_gradients = (-dot(x, y, (1, 1), keeps_float32) for x, y in zip(of_rhs, found, strict=True))
    return tuple(jnp.where(row > column, x, 0.0) for x in matrix_gradients), of_rhs


@with_custom_gradient(_solve_fwd, _solve_bwd, static_argnums=(2,))
def solve_unit_lower(matrices: ArraysPerHead, rhs: ArraysPerHead, keeps_float32: bool) -> ArraysPerHead:
    """Returns x [C, V] with `(1 + matrix) x = rhs` for each head; only the part of [C, C] below the diagonal is
    read.
    """
    inverse_matrices = invert_unit_lower(matrices, keeps_float32)
    return tuple(dot(matrix, x, (1, 0), keeps_float32) for matrix, x in zip(inverse_matrices, rhs, strict=True))


def invert_unit_lower(matrices: ArraysPerHead, keeps_float32: bool) -> ArraysPerHead:
    """Returns the inverses of `1 + matrix`, from diagonal blocks of 1, 2, 4, ... tokens.

    [[A, 0], [B, D]] has the inverse [[A', 0], [-D' B A', D']], with A' and D' the inverses of its blocks. The products
    of all blocks of a length are two products of whole matrices: first D' B, then that times A'. Rows of first blocks,
    which are 0 in both, are skipped if blocks are whole registers.
    """
    size = matrices[0].shape[0]
    row, column = row_and_column_indices(size)
    first, below_diagonal_mask = row == column, is_split_at_level(row, column, 0)
    found = [jnp.where(first, 1.0, jnp.where(below_diagonal_mask, -matrix, 0.0)) for matrix in matrices]
    for level in range(1, size.bit_length() - 1):
        length, below_diagonal_mask = 2**level, is_split_at_level(row, column, level)
        below_diagonal_blocks = [jnp.where(below_diagonal_mask, matrix, 0.0) for matrix in matrices]
        # All heads' first products, then all second ones: each depends on its own head's first.
        half = [
            dot(_rows_of_every_second_block(x, length), b, (1, 0), keeps_float32)
            for x, b in zip(found, below_diagonal_blocks, strict=True)
        ]
        half = [dot(x, inverse, (1, 0), keeps_float32) for x, inverse in zip(half, found, strict=True)]
        found = [_subtract_from_every_second_block(x, y, length) for x, y in zip(found, half, strict=True)]
    return tuple(found)


def _rows_of_every_second_block(x: jax.Array, block_rows: int) -> jax.Array:
    """Returns the rows of every second block; all rows if blocks are smaller than registers."""
    if block_rows < ROWS_PER_REGISTER:
        return x
    return jnp.concatenate([x[at : at + block_rows] for at in range(block_rows, x.shape[0], 2 * block_rows)], axis=0)


def _subtract_from_every_second_block(x: jax.Array, y: jax.Array, block_rows: int) -> jax.Array:
    """Returns x minus `y`, which has the rows of `_rows_of_every_second_block`."""
    if block_rows < ROWS_PER_REGISTER:
        return x - y
    parts: list[jax.Array] = []
    for number, at in enumerate(range(0, x.shape[0], 2 * block_rows)):
        second_half = x[at + block_rows : at + 2 * block_rows] - y[number * block_rows : (number + 1) * block_rows]
        parts += [x[at : at + block_rows], second_half]
    return jnp.concatenate(parts, axis=0)
