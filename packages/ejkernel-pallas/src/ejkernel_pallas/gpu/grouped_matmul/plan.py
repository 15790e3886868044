"""Padding to rows that the kernels tile, and the order of matrices in the kernel of matrix gradients.

Tiles of rows are planned by the family (`row_tiles`).
"""

import jax
import jax.numpy as jnp

from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

ROW_MULTIPLE = 8
"""What the number of rows is a multiple of: a copy of rows begins at a multiple of 8."""


def has_whole_tiles(rows: int) -> bool:
    """Returns whether the kernels of 16-bit operands compute a number of rows without padding."""
    return rows % ROW_MULTIPLE == 0 and rows >= WGMMA_M


def pad_rows(rows: jax.Array, value: int = 0) -> jax.Array:
    """Returns an array with as many rows as the kernels need; the padding belongs to no group."""
    if has_whole_tiles(rows.shape[0]):
        return rows
    count = max(-(-rows.shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE, WGMMA_M) - rows.shape[0]
    return jnp.pad(rows, [(0, count), *[(0, 0)] * (rows.ndim - 1)], constant_values=value)


def remove_padding(padded: jax.Array, rows: int) -> jax.Array:
    """Returns the first rows of an array that may have more."""
    return padded if padded.shape[0] == rows else padded[:rows]


def order_groups_by_size(group_starts: jax.Array, group_ends: jax.Array) -> jax.Array:
    """Returns first row, end and index of every matrix, ordered by decreasing number of rows: int32 [E, 3]."""
    rows, matrix = group_ends - group_starts, jnp.arange(group_starts.shape[0], dtype=jnp.int32)
    # Counting replaces sorting: sums over so few elements are small kernels, but a sort is a slow kernel.
    is_ordered_before = (rows > rows[:, None]) | ((rows == rows[:, None]) & (matrix < matrix[:, None]))
    position = jnp.sum(is_ordered_before, axis=1, dtype=jnp.int32)
    group_fields = jnp.stack((group_starts, group_ends, matrix), axis=1)
    return jnp.sum(jnp.where((position == matrix[:, None])[..., None], group_fields, 0), axis=1, dtype=jnp.int32)
