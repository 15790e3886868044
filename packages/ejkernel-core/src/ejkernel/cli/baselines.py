"""Lists the baselines of a call: the operation's reference, and functions of JAX that compute the same result."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.model import Op
from ejkernel.types.arguments import non_default_fields

RecordFunction = Callable[[Any], Any]


def baselines(op: Op, record: Any) -> Iterator[tuple[str, RecordFunction]]:
    """Yields names, and functions of the lowered record that return the family's output and compute the same call."""
    used = set(non_default_fields(record))
    for family, name, fields, function in _JAX_FUNCTIONS:
        if family == op.family.name and used <= fields:
            yield name, function
    yield "reference", lambda record: op.family.reference(record)[0]


def with_gradients(function: RecordFunction, grad_fields: frozenset[str]) -> RecordFunction:
    """Returns a function that computes the output, and the gradients of its sum by record field."""

    def output_and_gradients(record: Any) -> tuple[Any, dict[str, Any]]:
        values = {name: getattr(record, name) for name in grad_fields}
        output, pull = jax.vjp(lambda values: function(dataclasses.replace(record, **values)), values)
        (gradients,) = pull(jax.tree.map(jnp.ones_like, output))
        return output, gradients

    return output_and_gradients


def _dot_product_attention(record: Any) -> jax.Array:
    return jax.nn.dot_product_attention(
        record.query,
        record.key,
        record.value,
        bias=record.bias,
        scale=record.softmax_scale,
        is_causal=record.causal,
        local_window_size=record.sliding_window,
    )


def _ragged_dot(record: Any) -> jax.Array:
    rhs = jnp.swapaxes(record.rhs, 1, 2) if record.transpose_rhs else record.rhs
    sizes, out = record.group_sizes, record.out_dtype
    return jax.lax.ragged_dot(record.lhs, rhs, sizes, precision=record.precision, preferred_element_type=out)


def _convolution(record: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the convolution, and the last tokens, which a next call starts from."""
    channels, width = record.weight.shape
    kernel = record.weight.T[:, None, :].astype(record.x.dtype)  # [width, 1, channels]
    tokens = record.x.shape[1]
    padded = jnp.pad(jnp.swapaxes(record.x, 1, 2), ((0, 0), (0, 0), (width - 1, 0)))
    output = jax.lax.conv_general_dilated(
        record.x,
        kernel,
        window_strides=(1,),
        padding=[(width - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=channels,
    )
    return output, padded[:, :, tokens:]


_JAX_FUNCTIONS: tuple[tuple[str, str, set[str], RecordFunction], ...] = (
    ("tiled_attention", "jax.nn", {"bias", "causal", "sliding_window"}, _dot_product_attention),
    ("grouped_matmul", "lax", {"transpose_rhs", "precision"}, _ragged_dot),
    ("causal_convolution", "lax", set(), _convolution),
)
