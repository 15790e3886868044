"""The low-rank term of a chunk: what tokens read of the state before their decay, and write with another vector.

With a_j the vector that token j writes with, b_i the one that token i reads with, and the weights w of `chunk`, the
reads y_i = S_{i-1}^T b_i solve a unit lower triangular system (Peng et al. 2025, arXiv:2503.14456):

    y_i - sum_{j < i} <b_i, w_{i-1,j} a_j> y_j = (b_i * w_{i-1,0})^T S_0 + sum_{j < i} <b_i, w_{i-1,j} k_j> u_j

Weights end at token i - 1. The products of all pairs are those of a chunk in which each b_i is one row earlier, and
their rows are moved back afterwards. Keys and the other vectors are one operand of twice the tokens: at 64 tokens per
chunk their products fill 128 lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import shift_rows_down, shift_rows_up
from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot
from ejkernel_pallas.tpu.linear_recurrence.kernels.ut_transform import ArraysPerHead, solve_unit_lower


def written_vectors(x: Any) -> jax.Array:
    """Returns the vectors with which tokens write, [C, K]; with a low-rank term [2 C, K], keys first."""
    return x.key if x.low_rank_write is None else jnp.concatenate([x.key, x.low_rank_write], axis=0)


def low_rank_reads(
    states: ArraysPerHead, heads: Any, key_weights: Any, writes: ArraysPerHead, keeps_float32: bool
) -> ArraysPerHead:
    """Returns what each token reads of the state before it, [C, V] per head.

    Args:
        states: [K, V] per head, before the chunk.
        heads: The tokens of each head, with low-rank vectors.
        key_weights: Gates of each head's keys.
        writes: [C, V] per head, what tokens write with their keys.
        keeps_float32: Whether products keep float32's precision.
    """
    rhs: list[jax.Array] = []
    matrices: list[jax.Array] = []
    for state, x, key, write in zip(states, heads, key_weights, writes, strict=True):
        tokens = write.shape[0]
        pairs = key.pair_products(shift_rows_up(x.low_rank_read), written_vectors(x), keeps_float32)
        pairs = shift_rows_down(pairs, 0.0)
        known = dot(pairs[:, :tokens], write, (1, 0), keeps_float32)
        rhs.append(key.read_state_before(x.low_rank_read, state, keeps_float32) + known)
        matrices.append(-pairs[:, tokens:])
    return solve_unit_lower(tuple(matrices), tuple(rhs), keeps_float32)
