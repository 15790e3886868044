"""The grouped matmul family: the record its operations lower to and its meaning.

The rows of lhs belong to groups, one after another: group g owns the `group_sizes[g]` rows that follow those of the
groups before it. For a row i of group g, among the groups whose matrices are given:

    w_g   = rhs_g * rhs_scale_g          one scale for every column and block of rows of the matrix
    x_i   = lhs_i * lhs_scale_i          one scale for every row and block of contracted elements
    out_i = x_i w_g + rhs_bias_g + existing_out_i

Every other row is left over: `existing_out_i`, or 0, or with `left_over="undefined"` any numbers. Sums are taken in
float32 (float64 for float64 lhs).

Source: the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning.requests import PADDING, UNUSED

LEFT_OVER = ("zero", "undefined")
"""What rows of no group may be: with `"undefined"`, any numbers, infinities and NaN too."""


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
        left_over: Of `LEFT_OVER`; `"undefined"` without `existing_out` alone. Gradients of such rows are 0 either way.
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
    left_over: str = static("zero")


def accumulator(record: GroupedMatmul) -> Any:
    """The dtype of sums: float32, or float64 for float64 lhs."""
    return dtype_of_sums(record.lhs.dtype)


def dtype_of_sums(dtype: Any) -> Any:
    """The dtype in which products of a dtype are summed, and that of the output unless the call names another."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def columns(record: GroupedMatmul) -> int:
    """N."""
    return record.rhs.shape[1 if record.transpose_rhs else 2]


def group_rows(record: GroupedMatmul) -> tuple[jax.Array, jax.Array]:
    """First row of every matrix's group and the row after its last, both int32 [E] and in 0..M."""
    ends = running_sum(jnp.maximum(record.group_sizes, 0))
    bounds = jnp.minimum(jnp.pad(ends, (1, 0)), record.lhs.shape[0])
    matrices, groups = record.rhs.shape[0], ends.shape[0]
    if record.group_offset is None:
        return bounds[:matrices], bounds[1 : matrices + 1]
    group = record.group_offset + jnp.arange(matrices, dtype=jnp.int32)
    first = bounds[jnp.clip(group, 0, groups)]
    return first, jnp.where(group >= 0, bounds[jnp.clip(group + 1, 0, groups)], first)


def running_sum(x: jax.Array) -> jax.Array:
    """Sums of the first elements up to each of a short vector, int32: one small kernel, where a scan is several."""
    place = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(place[:, None] >= place, x, 0), axis=1, dtype=jnp.int32)


def matrix(record: GroupedMatmul, rhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Matrices as they are multiplied with.

    Args:
        record: Whose layout they have.
        rhs: [..., K, N] or [..., N, K], some of the record's.
        scale: [..., blocks, 1, N], their scales.
    """
    if scale is None:
        return rhs
    factors = spread(record, scale.astype(accumulator(record)))
    return rhs.astype(accumulator(record)) * factors


def rows(record: GroupedMatmul, lhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Rows as they are multiplied with.

    Args:
        record: Whose they are.
        lhs: [..., K], some of the record's.
        scale: [..., blocks], their scales.
    """
    if scale is None:
        return lhs
    factors = jnp.repeat(scale.astype(accumulator(record)), lhs.shape[-1] // scale.shape[-1], axis=-1)
    return lhs.astype(accumulator(record)) * factors


def gradients_of_rows(
    record: GroupedMatmul, product: jax.Array, lhs: jax.Array, scale: jax.Array, first_row: jax.Array | int = 0
) -> dict[str, jax.Array]:
    """Gradients of rows and of their scales, in the dtype of that of their product.

    Args:
        record: Whose they are.
        product: [m, K], the gradient of `rows(record, lhs, scale)`.
        lhs: [m, K], some of the record's rows.
        scale: [m, blocks], their scales.
        first_row: Which of the record's rows is the first of them.
    """
    shares = jnp.sum((product * lhs.astype(product.dtype)).reshape(*scale.shape, -1), axis=-1)
    first, end = group_rows(record)
    row = first_row + jnp.arange(lhs.shape[0], dtype=jnp.int32)
    # Rows without a matrix have gradients of 0, whatever they and their scales hold.
    assigned = ((row >= first[:, None]) & (row < end[:, None])).any(axis=0)[:, None]
    return {"lhs": jnp.where(assigned, rows(record, product, scale), 0), "lhs_scale": jnp.where(assigned, shares, 0)}


def spread(record: GroupedMatmul, scale: jax.Array) -> jax.Array:
    """Scales [..., blocks, 1, N] repeated to the shape of the matrices."""
    factors = jnp.repeat(scale[..., 0, :], record.lhs.shape[1] // scale.shape[-3], axis=-2)
    return jnp.swapaxes(factors, -1, -2) if record.transpose_rhs else factors


def reference(record: GroupedMatmul) -> tuple[jax.Array, tuple[()]]:
    """The family's meaning in plain jnp, every row times every matrix; float64 if lhs is, else float32.

    Returns:
        [M, N] in `out_dtype`. There are no residuals.
    """
    dtype, (first, end) = accumulator(record), group_rows(record)
    row = jnp.arange(record.lhs.shape[0], dtype=jnp.int32)
    owns = (row >= first[:, None]) & (row < end[:, None])
    lhs = jnp.where(owns.any(axis=0)[:, None], rows(record, record.lhs, record.lhs_scale).astype(dtype), 0)
    rhs = matrix(record, record.rhs, record.rhs_scale).astype(dtype)
    rhs = jnp.swapaxes(rhs, 1, 2) if record.transpose_rhs else rhs
    products = jnp.einsum("mk,ekn->emn", lhs, rhs, precision=lax.Precision.HIGHEST)
    if record.rhs_bias is not None:
        products = products + record.rhs_bias.astype(dtype)
    output = jnp.sum(jnp.where(owns[..., None], products, 0), axis=0)
    if record.existing_out is not None:
        output = output + record.existing_out.astype(dtype)
    return output.astype(record.out_dtype), ()


def localise(record: GroupedMatmul, offsets: Mapping[str, jax.Array]) -> GroupedMatmul:
    """Makes one shard's record mean its part of the global call: the groups have the rows that the shard has."""
    if "m" not in offsets:
        return record
    ends = jnp.cumsum(jnp.maximum(record.group_sizes, 0), dtype=jnp.int32) - offsets["m"]
    local = jnp.clip(ends, 0, record.lhs.shape[0])
    return dataclasses.replace(record, group_sizes=jnp.diff(local, prepend=0).astype(jnp.int32))


def axes(record: GroupedMatmul) -> dict[str, str]:
    """Axis letters of a record's fields and of its output."""
    return {
        "lhs": "m k",
        "rhs": "e n k" if record.transpose_rhs else "e k n",
        "group_sizes": "g",
        "group_offset": "",
        "existing_out": "m n",
        "rhs_scale": "e q c n",
        "rhs_bias": "e c n",
        "lhs_scale": "m l",
        "output": "m n",
    }


EXPERTS_OVER_DEVICES = (
    "give each device its own experts inside jax.shard_map, as examples/moe.py does: "
    "docs/operations/grouped_matmul.md, 'A whole expert layer'"
)


def requests(record: GroupedMatmul) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the groups, with their matrices, and the rows, which share those."""
    owner, matrices = _group_of_rows(record), np.arange(record.rhs.shape[0])
    rows = np.where(owner >= 0, np.arange(owner.size), PADDING)
    if record.existing_out is None and record.left_over == "zero":
        return {"m": owner, "e": matrices}, {"m": rows}
    # Rows without a matrix keep what is there.
    kept = [{n: np.where(owner >= 0, x, UNUSED)[:, None] for n in ("output", "existing_out")} for x in (owner, rows)]
    return {"m": owner, "e": matrices, **kept[0]}, {"m": rows, **kept[1]}


def _group_of_rows(record: GroupedMatmul) -> np.ndarray:
    """The matrix of every row, [M]; `PADDING` for rows without one."""
    (first, end), row = (np.asarray(x) for x in group_rows(record)), np.arange(record.lhs.shape[0])
    owns = (row >= first[:, None]) & (row < end[:, None])
    return np.where(owns.any(axis=0), owns.argmax(axis=0), PADDING)


FAMILY = Family(
    name="grouped_matmul",
    record=GroupedMatmul,
    differentiable=("lhs", "rhs", "existing_out", "rhs_scale", "rhs_bias", "lhs_scale"),
    dtype=lambda record: record.lhs.dtype,
    head_dims=lambda record: (record.lhs.shape[-1], columns(record)),
    axes=axes,
    shardable="mn",
    aligned=(),
    permissions=frozenset({"left_over"}),
    localise=localise,
    unsplit={"e": EXPERTS_OVER_DEVICES},
    reference=reference,
    requests=requests,
)
