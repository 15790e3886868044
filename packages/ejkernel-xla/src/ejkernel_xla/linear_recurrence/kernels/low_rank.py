"""The low-rank term of a chunk: what tokens read of the state before their decay, and write back with another vector.

With a_j the vector that token j writes, b_i the one that token i reads with, and w_ij = exp(sum of the gates of tokens
j+1..i) as in `chunk`, the reads y_i = S_{i-1}^T b_i solve a unit lower triangular system, as in the delta rule (the WY
representation of products of diagonal plus rank one matrices; Peng et al. 2025, arXiv:2503.14456):

    y_i - sum_{j < i} <b_i, w_{i-1,j} a_j> y_j = (b_i * w_{i-1,0})^T S_0 + sum_{j < i} <b_i, w_{i-1,j} k_j> u_j

Weights end at token i - 1, so they are those of a chunk in which each b_i is at the token before.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_xla.linear_recurrence.kernels.gates import KeyGates
from ejkernel_xla.linear_recurrence.kernels.products import multiply
from ejkernel_xla.linear_recurrence.kernels.ut_solve import ut_solve


def low_rank_reads(
    state: jax.Array,
    vectors: tuple[jax.Array, jax.Array],
    key: jax.Array,
    write: jax.Array,
    keys: KeyGates,
    precision: Any,
) -> jax.Array:
    """Returns y, [n, C, V].

    Args:
        state: [n, K, V] before the chunk.
        vectors: a and b, each [n, C, K].
        key: [n|m, C, K].
        write: [n, C, V], what tokens write with their keys.
        keys: Gates of the chunk.
        precision: Of the matrix products.
    """
    writes, reads = vectors
    first = multiply(reads[:, :1], state, precision)
    if reads.shape[1] == 1:
        return first
    count = state.shape[0]
    moved = jnp.concatenate([reads[:, 1:], jnp.zeros_like(reads[:, :1])], axis=1)
    known = keys.read(moved, state, precision) + multiply(
        keys.pair_products(moved, key, count, precision), write, precision
    )
    rhs = jnp.concatenate([first, known[:, :-1]], axis=1)
    return ut_solve(-_shift_rows_down(keys.pair_products(moved, writes, count, precision)), rhs, precision)


def _shift_rows_down(matrix: jax.Array) -> jax.Array:
    """Returns [n, C, C] lower triangular matrices with rows moved down by one, so that the diagonal is zero."""
    return jnp.concatenate([jnp.zeros_like(matrix[:, :1]), matrix[:, :-1]], axis=1)
