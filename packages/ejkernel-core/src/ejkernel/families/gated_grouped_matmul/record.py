"""Defines the argument record of gated grouped matmul, and functions of the record alone."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.types.arguments import arguments, static

ACTIVATIONS = ("silu", "gelu")
"""Activations of a gate."""

UNGATED_ACTIVATIONS = (*ACTIVATIONS, "relu2")
"""Activations without a gate; `"relu2"` is the squared ReLU."""


@arguments
class GatedGroupedMatmul:
    """Canonical input of one gated grouped matmul. T tokens, K contracted, E matrices, M rows, F columns.

    Attributes:
        lhs: [T, K] floating.
        rhs: [E, K, 2 F] in lhs's dtype, the columns of the gate first; [E, 2 F, K] if `transpose_rhs`. Of any numeric
            dtype with `rhs_scale`.
        group_sizes: [E] int32, rows of every group.
        indices: [M] int32, the token of every row; outside of 0..T-1 for none. None for row m of token m.
        rhs_bias: [E, 1, 2 F] floating, added to the products.
        rhs_scale: [E, blocks, 1, 2 F] floating, as `GroupedMatmul` has it.
        activation: Of the gate: `"silu"`, or `"gelu"` by its tanh formula.
        transpose_rhs: Whether the matrices lie with their columns first.
        interleaved: Whether columns of the gate and of the factor alternate.
        gated: False for rhs with F columns, whose activation is the output.
        alpha: Factor in the sigmoid of silu.
        beta: Added to the factor.
        limit: Largest value of the gate, and largest magnitude of the factor; None for none.
        precision: Of the product, as `GroupedMatmul` has it.
        left_over: The same.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    indices: jax.Array | None = None
    rhs_bias: jax.Array | None = None
    activation: str = static("silu")
    transpose_rhs: bool = static(False)
    interleaved: bool = static(False)
    gated: bool = static(True)
    alpha: float = static(1.0)
    beta: float = static(0.0)
    limit: float | None = static(None)
    precision: lax.Precision | None = static(default=None)
    left_over: str = static()
    rhs_scale: jax.Array | None = None


def as_grouped_matmul(record: GatedGroupedMatmul, rows: Any, dtype: Any) -> GroupedMatmul:
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
        rhs_scale=record.rhs_scale,
        rhs_bias=record.rhs_bias,
        transpose_rhs=record.transpose_rhs,
        precision=record.precision,
        left_over=record.left_over,
    )


def rows_with_a_token(record: GatedGroupedMatmul) -> jax.Array:
    """Returns which rows name a token, bool [M]."""
    if record.indices is None:
        return jnp.ones(record.lhs.shape[0], bool)
    return (record.indices >= 0) & (record.indices < record.lhs.shape[0])


def gathered_tokens(record: GatedGroupedMatmul) -> jax.Array:
    """Returns the token of every row, [M, K]; 0 for none."""
    if record.indices is None:
        return record.lhs
    if not record.lhs.shape[0]:  # no index names a token
        return jnp.zeros((record.indices.shape[0], record.lhs.shape[1]), record.lhs.dtype)
    of_token = rows_with_a_token(record)
    return jnp.where(of_token[:, None], record.lhs[jnp.where(of_token, record.indices, 0)], 0)


def apply_gate(record: GatedGroupedMatmul, products: jax.Array) -> jax.Array:
    """Returns the output of products [M, 2 F], or [M, F] without a gate."""
    if not record.gated:
        output = activate_products(record, products)
    elif record.interleaved:
        output = activated_gate_times_factor(record, products[:, ::2], products[:, 1::2])
    else:
        output = activated_gate_times_factor(record, *jnp.split(products, 2, axis=-1))
    if record.rhs_bias is not None and record.indices is not None:  # the product of a row without a token is the bias
        output = jnp.where(rows_with_a_token(record)[:, None], output, 0)
    return output.astype(record.lhs.dtype)


class GateParameters(Protocol):
    """The record fields that an activation reads. `GatedGroupedMatmul` documents them."""

    @property
    def activation(self) -> str: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def limit(self) -> float | None: ...


def activated_gate_times_factor(function: GateParameters, gate: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns the activation of the gate times the factor, of products of the same shape."""
    if function.limit is not None:
        gate, factor = jnp.minimum(gate, function.limit), jnp.clip(factor, -function.limit, function.limit)
    return activate_products(function, gate) * (factor + function.beta if function.beta else factor)


def activate_products(function: GateParameters, x: jax.Array) -> jax.Array:
    """Returns the activation of products."""
    if function.activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    if function.activation == "gelu":
        return jax.nn.gelu(x)
    return jax.nn.silu(x) if function.alpha == 1 else x * jax.nn.sigmoid(function.alpha * x)
