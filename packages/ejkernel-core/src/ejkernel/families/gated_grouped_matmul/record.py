"""The argument record of gated grouped matmul, and what follows from it alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.types.arguments import arguments, static

ACTIVATIONS = ("silu", "gelu")


@arguments
class GatedGroupedMatmul:
    """Canonical input of one gated grouped matmul. T tokens, K contracted, E matrices, M rows, F columns.

    Attributes:
        lhs: [T, K] floating.
        rhs: [E, K, 2 F] in lhs's dtype, the columns of the gate first.
        group_sizes: [E] int32, rows of every group.
        indices: [M] int32, the token of every row; outside of 0..T-1 for none. None for row m of token m.
        activation: Of the gate: `"silu"`, or `"gelu"` by its tanh formula.
        precision: Of the product, as `GroupedMatmul` has it.
        left_over: The same.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    indices: jax.Array | None = None
    activation: str = static("silu")
    precision: lax.Precision | None = static(default=None)
    left_over: str = static("zero")


def product_record(record: GatedGroupedMatmul, rows: Any, dtype: Any) -> GroupedMatmul:
    """Returns the record of the product.

    Args:
        record: The record.
        rows: [M, K], the token of every row, or its shape.
        dtype: Dtype of the product.
    """
    return GroupedMatmul(
        lhs=rows,
        rhs=record.rhs,
        group_sizes=record.group_sizes,
        out_dtype=dtype,
        transpose_rhs=False,
        precision=record.precision,
        left_over=record.left_over,
    )


def gathered(record: GatedGroupedMatmul) -> jax.Array:
    """Returns the token of every row, [M, K]; 0 for none."""
    if record.indices is None:
        return record.lhs
    if not record.lhs.shape[0]:  # no index names a token
        return jnp.zeros((record.indices.shape[0], record.lhs.shape[1]), record.lhs.dtype)
    named = (record.indices >= 0) & (record.indices < record.lhs.shape[0])
    return jnp.where(named[:, None], record.lhs[jnp.where(named, record.indices, 0)], 0)


def gate(record: GatedGroupedMatmul, products: jax.Array) -> jax.Array:
    """Returns the output of products [M, 2 F]."""
    first, second = jnp.split(products, 2, axis=-1)
    activation = jax.nn.silu if record.activation == "silu" else jax.nn.gelu
    return (activation(first) * second).astype(record.lhs.dtype)
