"""Row and lane vectors: broadcasting, transposing and splitting them by vector register.

A statistic of rows, such as the maximum of a softmax, is kept as [rows, 128] with the same value in every lane, which
is what an operation with scores [rows, keys] reads without a broadcast.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv

LANES, SUBLANES = 128, 8


def pad_to_lanes(size: int) -> int:
    """Returns a size padded to whole lane groups."""
    return cdiv(size, LANES) * LANES


def lane_groups(x: jax.Array) -> list[jax.Array]:
    """Returns the lane groups [n, 128] of an array [n, m]."""
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def repeat_lanes(x: jax.Array, width: int) -> jax.Array:
    """Repeats [n, 128], the same in every lane, to [n, width]."""
    if width <= LANES:
        return x if width == LANES else x[:, :width]
    results = jnp.concatenate([x] * cdiv(width, LANES), axis=1)
    return results[:, :width] if width % LANES else results


def row_to_column(row: jax.Array) -> jax.Array:
    """Turns a row [1, n] into a column [n, 128], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def column_to_row(x: jax.Array) -> jax.Array:
    """Turns a column [128, 128], the same in every lane, into a row [1, 128], without the slow transpose unit."""
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1))
    folded = x[:SUBLANES]
    for row in range(SUBLANES, x.shape[0], SUBLANES):
        folded = jnp.where(lane >= row, x[row : row + SUBLANES], folded)
    return jnp.sum(jnp.where(lane % SUBLANES == sublane, folded, 0.0), axis=0, keepdims=True)


def deinterleave(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the even and the odd columns of [n, m] float32, m a multiple of 256, by permuting lane groups."""
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1)
    even, groups = (lane * 2) % LANES, lane_groups(x)

    def every_other_column(index: jax.Array) -> jax.Array:
        first, second = ([jnp.take_along_axis(x, index, axis=1) for x in groups[n::2]] for n in (0, 1))
        pairs = zip(first, second, strict=True)
        return jnp.concatenate([jnp.where(lane < LANES // 2, *pair) for pair in pairs], axis=1)

    return every_other_column(even), every_other_column(even + 1)


def matrix_product(a: jax.Array, b: jax.Array, contracted_axes: tuple[int, int], precision: Any) -> jax.Array:
    """Returns the product of two matrices over one axis of each, accumulated in float32."""
    dims = (((contracted_axes[0],), (contracted_axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def zero_outside(x: jax.Array, first: Any, end: Any, axis: int) -> jax.Array:
    """Returns x with 0 where the index along `axis` is below `first`, or not below `end`."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((index >= first) & (index < end), x, jnp.zeros_like(x))
