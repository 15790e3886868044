"""Defines the argument record of grouped matmul, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.arguments import arguments, static

UNASSIGNED_ROW_CHOICES = ("zero", "undefined")
"""The values of `left_over`: what unassigned rows hold. With `"undefined"` they may hold any number, infinity or NaN.
"""


@arguments
class GroupedMatmul:
    """Canonical input of one grouped matmul. M rows, K contracted, N columns, E matrices.

    Attributes:
        lhs: [M, K] floating; of 8 bits with `lhs_scale` only.
        rhs: [E, K, N], or [E, N, K] if `transpose_rhs`; floating, or integer with `rhs_scale`.
        group_sizes: [G] int32, rows of every group.
        out_dtype: Floating dtype of the output.
        group_offset: int32 scalar, the group that the first matrix belongs to; None is 0. The rows of groups without
            a matrix are those of no group.
        existing_out: [M, N] floating, added to the product.
        rhs_scale: [E, blocks, 1, N] floating, factors on blocks of `K / blocks` of the contracted elements.
        rhs_bias: [E, 1, N] floating.
        lhs_scale: [M, blocks] floating, factors on blocks of `K / blocks` of the contracted elements; not as many
            blocks as `rhs_scale` has, if need be.
        transpose_rhs: Whether the matrices lie with their columns first.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
        left_over: Of `UNASSIGNED_ROW_CHOICES`; `"undefined"` without `existing_out` alone. Gradients of such rows are 0
            either way.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    out_dtype: Any = static()
    group_offset: jax.Array | None = None
    existing_out: jax.Array | None = None
    rhs_scale: jax.Array | None = None
    rhs_bias: jax.Array | None = None
    lhs_scale: jax.Array | None = None
    transpose_rhs: bool = static(False)
    precision: lax.Precision | None = static(default=None)
    left_over: str = static()


def accumulator(record: GroupedMatmul) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64 lhs."""
    return product_sum_dtype(record.lhs.dtype)


def product_sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which products of a dtype are summed, and that of the output unless the call
    names another.
    """
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def columns(record: GroupedMatmul) -> int:
    """Returns N, the number of columns."""
    return record.rhs.shape[1 if record.transpose_rhs else 2]


def group_row_bounds(record: GroupedMatmul) -> tuple[jax.Array, jax.Array]:
    """Returns first row of every matrix's group and the row after its last, both int32 [E] and in 0..M."""
    ends = running_sum(jnp.maximum(record.group_sizes, 0))
    bounds = jnp.minimum(jnp.pad(ends, (1, 0)), record.lhs.shape[0])
    matrices, groups = record.rhs.shape[0], ends.shape[0]
    if record.group_offset is None:
        return bounds[:matrices], bounds[1 : matrices + 1]
    group = record.group_offset + jnp.arange(matrices, dtype=jnp.int32)
    first = bounds[jnp.clip(group, 0, groups)]
    return first, jnp.where(group >= 0, bounds[jnp.clip(group + 1, 0, groups)], first)


def running_sum(x: jax.Array) -> jax.Array:
    """Returns sums of the first elements up to each of a short vector, int32: one small kernel, where a scan is
    several.
    """
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[:, None] >= index, x, 0), axis=1, dtype=jnp.int32)


def scaled_matrices(record: GroupedMatmul, rhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the matrices with their scales applied, as they are multiplied.

    Args:
        record: The record that has the layout of the matrices.
        rhs: [..., K, N] or [..., N, K], some of the record's.
        scale: [..., blocks, 1, N], their scales.
    """
    if scale is None:
        return rhs
    factors = spread(record, scale.astype(accumulator(record)))
    return rhs.astype(accumulator(record)) * factors


def rows(record: GroupedMatmul, lhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the rows with their scales applied, as they are multiplied.

    Args:
        record: Whose they are.
        lhs: [..., K], some of the record's.
        scale: [..., blocks], their scales.
    """
    if scale is None:
        return lhs
    factors = jnp.repeat(scale.astype(accumulator(record)), lhs.shape[-1] // scale.shape[-1], axis=-1)
    return lhs.astype(accumulator(record)) * factors


def lhs_and_scale_gradients(
    record: GroupedMatmul, product: jax.Array, lhs: jax.Array, scale: jax.Array, first_row: jax.Array | int = 0
) -> dict[str, jax.Array]:
    """Returns gradients of rows and of their scales, in the dtype of that of their product.

    Args:
        record: Whose they are.
        product: [m, K], the gradient of `rows(record, lhs, scale)`.
        lhs: [m, K], some of the record's rows.
        scale: [m, blocks], their scales.
        first_row: Which of the record's rows is the first of them.
    """
    shares = jnp.sum((product * lhs.astype(product.dtype)).reshape(*scale.shape, -1), axis=-1)
    first, end = group_row_bounds(record)
    row = first_row + jnp.arange(lhs.shape[0], dtype=jnp.int32)
    # Rows without a matrix have gradients of 0, even if the rows or their scales hold NaN.
    assigned = ((row >= first[:, None]) & (row < end[:, None])).any(axis=0)[:, None]
    return {"lhs": jnp.where(assigned, rows(record, product, scale), 0), "lhs_scale": jnp.where(assigned, shares, 0)}


def spread(record: GroupedMatmul, scale: jax.Array) -> jax.Array:
    """Returns scales [..., blocks, 1, N], repeated to the shape of the matrices."""
    factors = jnp.repeat(scale[..., 0, :], record.lhs.shape[1] // scale.shape[-3], axis=-2)
    return jnp.swapaxes(factors, -1, -2) if record.transpose_rhs else factors
