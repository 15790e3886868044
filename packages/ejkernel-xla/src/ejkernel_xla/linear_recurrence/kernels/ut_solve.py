"""Unit lower triangular systems: the UT transform of the delta rule (Yang et al. 2024, arXiv:2412.06464)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_xla.linear_recurrence.kernels.products import (
    multiply,
    multiply_columns,
    multiply_rows,
    with_gradients,
)


@with_gradients(2)
def ut_solve(matrix: jax.Array, rhs: jax.Array, precision: Any) -> jax.Array:
    """Returns the solution x of `(1 + matrix) x = rhs`.

    Args:
        matrix: [..., C, C], of which only what lies below the diagonal is read; C is a power of two.
        rhs: [..., C, d].
        precision: Of the matrix products.
    """
    return multiply(inverse(matrix, precision), rhs, precision)


def _ut_solve_fwd(matrix: jax.Array, rhs: jax.Array, precision: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse_matrix = inverse(matrix, precision)
    solution = multiply(inverse_matrix, rhs, precision)
    return solution, (inverse_matrix, solution)


def _ut_solve_bwd(
    precision: Any, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Through the solution and not through the halvings: two products with the inverse that there is.
    inverse_matrix, solution = saved
    rhs = multiply_columns(inverse_matrix, cotangent, precision)
    return jnp.tril(-multiply_rows(rhs, solution, precision), -1), rhs


ut_solve.defvjp(_ut_solve_fwd, _ut_solve_bwd)


def inverse(matrix: jax.Array, precision: Any) -> jax.Array:
    """Returns the inverse of `1 + matrix`, [..., C, C], from blocks of 1, 2, 4, ... tokens on its diagonal.

    [[A, 0], [B, D]] has the inverse [[A', 0], [-D' B A', D']], with A' and D' those of its blocks.
    """
    length = matrix.shape[-1]
    corners = [matrix[..., None, :, :]]  # the blocks on the diagonal, of C, C / 2, ..., 2 tokens
    while (n := corners[-1].shape[-1] // 2) > 1:
        halves = jnp.stack([corners[-1][..., :n, :n], corners[-1][..., n:, n:]], axis=-3)
        corners.append(halves.reshape(*matrix.shape[:-2], -1, n, n))
    # The inverse of a block of one token is 1, for any diagonal of the matrix; log2(C) doublings follow. Substitution
    # would take C steps, each too short for a matrix product.
    blocks = jnp.ones((*matrix.shape[:-2], length, 1, 1), matrix.dtype)
    for block in reversed(corners):
        n = blocks.shape[-1]
        pairs = blocks.reshape(*blocks.shape[:-3], -1, 2, n, n)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = block[..., n:, :n]
        # Blocks of one token are 1 and need no product.
        if n > 1:
            corner = _matrix_product(second, _matrix_product(corner, first, precision), precision)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([-corner, second], axis=-1)], axis=-2)
    return blocks[..., 0, :, :]


def _matrix_product(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns matrix products of [..., n, n]; small ones are unrolled, because a library call costs more."""
    n = left.shape[-1]
    if n > 4:
        return jnp.matmul(left, right, precision=precision)
    return functools.reduce(jnp.add, [left[..., :, k : k + 1] * right[..., k : k + 1, :] for k in range(n)])
