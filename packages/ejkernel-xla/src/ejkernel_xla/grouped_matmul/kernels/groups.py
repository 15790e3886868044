"""Loops over the groups of a record and over the tiles of rows they are cut into.

group g     |  large tile  |  large tile  | quarter | quarter | small |..     sizes from large to small
matrix g is loaded once; the last small tile masks the rows after the group's end
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul import GroupedMatmul, accumulator, rows, scaled_matrices
from ejkernel.planning.precision import product_precision


class RowTile(NamedTuple):
    """Some rows of a group.

    Attributes:
        start: First row.
        valid: Which of the rows belong to the tile, bool [size, 1]. The last tile of a group extends past it, and one
            that would end past the array is moved back.
    """

    start: jax.Array
    valid: jax.Array

    def take(self, x: jax.Array) -> jax.Array:
        """Returns the tile's rows of x."""
        return lax.dynamic_slice_in_dim(x, self.start, self.valid.shape[0])

    def rows(self, record: GroupedMatmul) -> jax.Array:
        """Returns the tile's rows as an operand: with their scales applied."""
        return rows(record, self.take(record.lhs), self.scales(record))

    def scales(self, record: GroupedMatmul) -> jax.Array | None:
        """Returns the scales of the tile's rows."""
        return None if record.lhs_scale is None else self.take(record.lhs_scale)

    def put(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns x with the tile's valid rows replaced."""
        # Rows after the group's end belong to the next group and keep their values.
        merged = jnp.where(self.valid, rows.astype(x.dtype), self.take(x))
        return lax.dynamic_update_slice_in_dim(x, merged, self.start, 0)


def fold_row_tiles(
    first: jax.Array, end: jax.Array, sizes: tuple[int, ...], rows: int, body: Callable[..., Any], carry: Any
) -> Any:
    """Folds `body(tile, carry)` over rows `first` to `end` of an array with `rows` of them."""
    # Large tiles serve most rows, and small tiles the remaining rows: a group of few rows wastes at most one small
    # tile.
    for size in sizes:
        remaining = end - first
        count = cdiv(remaining, size) if size == sizes[-1] else remaining // size

        def step(n: jax.Array, carry: Any, first: jax.Array = first, size: int = size) -> Any:
            tile_start = first + n * size
            start = jnp.minimum(tile_start, rows - size)
            row = start + jnp.arange(size, dtype=jnp.int32)
            return body(RowTile(start, ((row >= tile_start) & (row < end))[:, None]), carry)

        carry = lax.fori_loop(jnp.int32(0), count, step, carry)
        first = first + count * size
    return carry


def fold_groups(first: jax.Array, end: jax.Array, body: Callable[..., Any], carry: Any) -> Any:
    """Folds `body(group, first, end, carry)` over the groups that have rows."""

    def group(g: jax.Array, carry: Any) -> Any:
        # A loop of at most one iteration instead of a branch, at whose end XLA would copy the carry.
        nonempty = (end[g] > first[g]).astype(jnp.int32)
        return lax.fori_loop(jnp.int32(0), nonempty, lambda _, carry: body(g, first[g], end[g], carry), carry)

    return lax.fori_loop(jnp.int32(0), jnp.int32(first.shape[0]), group, carry)


def load(record: GroupedMatmul, g: jax.Array) -> jax.Array:
    """Returns the matrix of a group as an operand, [K, N] or [N, K]: with its scales applied."""
    rhs = lax.dynamic_index_in_dim(record.rhs, g, keepdims=False)
    scale = None if record.rhs_scale is None else lax.dynamic_index_in_dim(record.rhs_scale, g, keepdims=False)
    return scaled_matrices(record, rhs, scale)


def dot(record: GroupedMatmul, left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the product of two matrices over one axis of each, in the accumulator's dtype."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((axes[0],), (axes[1],)), ((), ())),
        # With scales, operands of 8 bits have more digits than their dtype.
        precision=product_precision(dtype if record.lhs.dtype.itemsize == 1 else record.lhs.dtype, record.precision),
        preferred_element_type=accumulator(record),
    )
