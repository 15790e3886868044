"""Sums over the earlier tokens of a chunk, each decayed by the gates between the two tokens, for gates of any strength.

The gates are logs g_t <= 0, per head or per channel. A pair of tokens j <= i is weighted by exp(g_{j+1} + ... + g_i).
A difference of cumulative log-decays would cancel, and exp(b_i) * exp(-b_j) would overflow. Instead the chunk is halved
again and again: a pair that a cut at m separates has the weight

    exp(g_{m+1} + ... + g_i) * exp(g_{j+1} + ... + g_m)

whose factors are both at most 1 and belong to one token each, so that every square between two halves is a matrix
product. Weights are multiplied and never divided, so -inf is a valid gate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_xla.linear_recurrence.kernels.products import dot_products, multiply, multiply_rows, scale_vectors


class DecaySpans(NamedTuple):
    """Weights of the gates within the blocks of a chunk, exponentials of their sums; [..., blocks, length, channels].

    Attributes:
        decay_since_start: From the block's first token to each token, both included.
        decay_until_end: From the token after each token to the block's last.
    """

    decay_since_start: jax.Array
    decay_until_end: jax.Array


def decay_spans(gates: jax.Array) -> list[DecaySpans]:
    """Returns the weights of [..., C, channels] log gates in blocks of length 1, 2, 4, ..., C, which is a power of two.

    Exponentials are taken once, of the gates, and multiplied: no factor is above 1. Exponentials of the sums at every
    level would cost more, since XLA's CPU compiler recomputes them in every loop that reads them.
    """
    decay_since_start = jnp.exp(gates)[..., None, :]
    levels = [DecaySpans(decay_since_start, jnp.ones_like(decay_since_start))]
    while levels[-1].decay_since_start.shape[-3] > 1:
        (decay_since_start, later), (decay_until_end, rest) = (split(x) for x in levels[-1])
        late = jnp.concatenate([decay_since_start, decay_since_start[..., -1:, :] * later], axis=-2)
        early = jnp.concatenate([decay_until_end * later[..., -1:, :], rest], axis=-2)
        levels.append(DecaySpans(late, early))
    return levels


def split(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns [..., 2 m, n, d] as the first and the second block of each pair, [..., m, n, d]."""
    pairs = blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def off_diagonal_squares(
    left: jax.Array, right: jax.Array, levels: list[DecaySpans] | None, precision: lax.Precision | None = None
) -> list[jax.Array]:
    """Returns scores of each later token i with each earlier token j: `sum_k left_ik weight_ijk right_jk`.

    Args:
        left: [..., C, channels] of the later tokens.
        right: [..., C, channels] of the earlier tokens.
        levels: Spans of the gates; None weighs every pair by 1.
        precision: Of the matrix products.

    Returns:
        For n = 1, 2, 4, ..., C / 2 the squares between the halves of blocks of 2 n: [..., C / (2 n), n, n].
    """
    triangle_levels, n, length = [], 1, left.shape[-2]
    while n < length:
        _, later = split(_split_into_blocks(left, n))
        earlier, _ = split(_split_into_blocks(right, n))
        if levels is not None:
            level = levels[n.bit_length() - 1]
            # The factors multiply the operands. Each token has one factor per level, so no [n, n, channels] array is
            # needed.
            later = later * split(level.decay_since_start)[1]
            earlier = earlier * split(level.decay_until_end)[0]
        triangle_levels.append(batched_outer_product(later, earlier, precision))
        n *= 2
    return triangle_levels


def batched_outer_product(left: jax.Array, right: jax.Array, precision: lax.Precision | None = None) -> jax.Array:
    """Returns [..., n, d] and [..., m, d] as products [..., n, m]; leading dimensions broadcast."""
    if left.shape[-1] == 1:
        return left * jnp.swapaxes(right, -1, -2)
    return dot_products(left, right)[..., None] if left.shape[-2] == 1 else multiply_rows(left, right, precision)


def lower_triangular_matrix(diagonal: jax.Array, squares: list[jax.Array]) -> jax.Array:
    """Returns the lower triangular [..., C, C] matrix of a diagonal [..., C] and of `off_diagonal_squares`."""
    if squares:
        diagonal = jnp.broadcast_to(diagonal, (*squares[0].shape[:-3], diagonal.shape[-1]))
    blocks = diagonal[..., None, None]
    for square in squares:
        first, second = split(blocks)
        blocks = _join_triangles(first, square, second)
    return blocks[..., 0, :, :]


def _join_triangles(first_triangle: jax.Array, corner: jax.Array, second_triangle: jax.Array) -> jax.Array:
    """Returns [[first, 0], [corner, second]], each [..., n, n]."""
    upper = jnp.concatenate([first_triangle, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second_triangle], axis=-1)], axis=-2)


def apply_triangle(
    diagonal: jax.Array,
    squares: list[jax.Array],
    values: jax.Array,
    levels: list[DecaySpans],
    precision: lax.Precision | None = None,
) -> jax.Array:
    """Returns the triangular matrix times values, each pair decayed by the gates of value channels: [..., C, channels].

    Args:
        diagonal: [..., C].
        squares: From `off_diagonal_squares`.
        values: [..., C, channels].
        levels: Spans of the value gates.
        precision: Of the matrix products.
    """
    total = scale_vectors(values, diagonal)
    for n, square in enumerate(squares):
        length = 2**n
        earlier, _ = split(_split_into_blocks(values, length))
        fresh = earlier * split(levels[n].decay_until_end)[0]
        correction = multiply(square, fresh, precision) * split(levels[n].decay_since_start)[1]
        pairs = jnp.stack([jnp.zeros_like(correction), correction], axis=-3)  # nothing for the first block of each pair
        total = total + pairs.reshape(total.shape)
    return total


def _split_into_blocks(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1, n, x.shape[-1])
