"""Defines what grouped matmul computes, in plain jnp.

The rows of lhs belong to groups, one after another: group g owns the `group_sizes[g]` rows that follow those of the
groups before it. For a row i of group g, among the groups whose matrices are given:

    w_g   = rhs_g * rhs_scale_g          one scale for every column and block of rows of the matrix
    x_i   = lhs_i * lhs_scale_i          one scale for every row and block of contracted elements
    out_i = x_i w_g + rhs_bias_g + existing_out_i

Every other row is left over: `existing_out_i`, or 0, or with `left_over="undefined"` any numbers. Sums are taken in
float32 (float64 for float64 lhs).

Source: the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul.record import GroupedMatmul, accumulator, group_row_bounds, rows, scaled_matrices


def reference(record: GroupedMatmul) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp, every row times every matrix; in float64 if `lhs` is float64,
    else in float32.

    Returns:
        [M, N] in `out_dtype`. There are no residuals.
    """
    dtype, (first, end) = accumulator(record), group_row_bounds(record)
    row = jnp.arange(record.lhs.shape[0], dtype=jnp.int32)
    owns = (row >= first[:, None]) & (row < end[:, None])
    lhs = jnp.where(owns.any(axis=0)[:, None], rows(record, record.lhs, record.lhs_scale).astype(dtype), 0)
    rhs = scaled_matrices(record, record.rhs, record.rhs_scale).astype(dtype)
    rhs = jnp.swapaxes(rhs, 1, 2) if record.transpose_rhs else rhs
    products = jnp.einsum("mk,ekn->emn", lhs, rhs, precision=lax.Precision.HIGHEST)
    if record.rhs_bias is not None:
        products = products + record.rhs_bias.astype(dtype)
    output = jnp.sum(jnp.where(owns[..., None], products, 0), axis=0)
    if record.existing_out is not None:
        output = output + record.existing_out.astype(dtype)
    return output.astype(record.out_dtype), ()
