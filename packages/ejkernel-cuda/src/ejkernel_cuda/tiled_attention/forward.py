"""Tiled attention by cuDNN."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention, causal_window_bounds
from ejkernel.planning.batch_rows import run_with_batch_rows
from ejkernel_cuda.tiled_attention.kernels.cudnn import (
    drop_none,
    emit_custom_call,
    query_key_value,
    replace_infinite_bias,
)

# The matrix products of attention by name: contracted and batch axes of both operands, for arrays in their memory
# layout.
FORWARD_PRODUCT_DIMENSIONS = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}


def forward(record: TiledAttention, config: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, T, H, Dv] and lse [B, H, T]."""
    if record.bias is None:
        return _run(record)
    attends = _query_attends(record)
    output, residuals = _run(replace_infinite_bias(record))
    lse = jnp.where(attends, residuals.lse, -jnp.inf)
    return jnp.where(attends.swapaxes(1, 2)[..., None], output, 0), SoftmaxResiduals(lse=lse)


def _query_attends(record: TiledAttention) -> jax.Array:
    """Returns whether each query attends to any key, as bool [B|1, H|1, T]; the record has a bias, where -inf masks."""
    assert record.bias is not None  # checked by the caller
    left, right = causal_window_bounds(record)
    steps = jnp.arange(record.key.shape[1]) - jnp.arange(record.query.shape[1])[:, None]
    attended = record.bias > -jnp.inf
    attended = attended if left is None else attended & (steps >= -left)
    return jnp.any(attended if right is None else attended & (steps <= right), axis=-1)


def _run(record: TiledAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    inputs = {"query": record.query, "key": record.key, "value": record.value}
    operands = inputs if record.bias is None else {**inputs, "bias": record.bias}

    def run(operands: dict[str, jax.Array], rows: int) -> tuple[jax.Array, ...]:
        # `run_with_batch_rows` keeps an operand that all rows share at one row, which cuDNN supports for a bias only.
        query_key_value_rows = {
            name: jnp.broadcast_to(operands[name], (rows, *operands[name].shape[1:])) for name in inputs
        }
        return _emit_forward_call(dataclasses.replace(record, **{**operands, **query_key_value_rows}))

    output, lse = run_with_batch_rows(run, operands, record.query.shape[0])
    return output, SoftmaxResiduals(lse=lse)


def _emit_forward_call(record: TiledAttention) -> tuple[jax.Array, ...]:
    b, t, h, _ = record.query.shape
    output = jax.ShapeDtypeStruct((b, t, h, record.value.shape[-1]), record.query.dtype)
    lse = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    return emit_custom_call(
        record, "", FORWARD_PRODUCT_DIMENSIONS, drop_none(*query_key_value(record), record.bias), (output,), (lse,)
    )
