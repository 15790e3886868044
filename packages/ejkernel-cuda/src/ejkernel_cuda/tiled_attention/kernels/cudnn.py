"""cuDNN's fused attention, called as XLA calls it.

`jax.nn.dot_product_attention` rounds the logarithm of the denominator to the query's dtype, and its backward pass takes
no other's residuals. So this makes the custom calls itself, which XLA's compiler replaces by cuDNN graphs.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention, band

HEADS_FIRST = (0, 2, 1, 3)
"""Permutation between [B, T, H, D], which arrays have, and [B, H, T, D], which the calls' results are said to have."""

MASKED = {"bfloat16": -1e30, "float16": -6e4}
"""A bias so low that its weight is 0 next to any other; both dtypes hold it."""


def finite(record: TiledAttention) -> TiledAttention:
    """The record with a bias without -inf: in a row of nothing else, cuDNN's softmax is free to divide 0 by 0."""
    assert record.bias is not None  # the caller looked
    bias = jnp.where(record.bias == -jnp.inf, MASKED[record.bias.dtype.name], record.bias)
    return dataclasses.replace(record, bias=bias.astype(record.bias.dtype))


def inputs_of(record: TiledAttention) -> tuple[jax.Array, ...]:
    """Returns query, key and value."""
    return record.query, record.key, record.value


def present(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns the arrays that are there."""
    return tuple(x for x in arrays if x is not None)


def call(
    record: TiledAttention,
    direction: str,
    products: dict[str, Any],
    operands: tuple[jax.Array, ...],
    arrays: tuple[Any, ...],
    others: tuple[Any, ...],
) -> tuple[jax.Array, ...]:
    """One of XLA's custom calls for cuDNN.

    Args:
        record: The call's record.
        direction: What the name of the custom call ends with.
        products: The matrix products in it.
        operands: Its operands.
        arrays: What is like its results of shape [B, T, H, D].
        others: What is like its other results.

    Returns:
        The results, in that order.
    """
    # Results are declared as [B, H, T, D], as XLA's pass wants them, with a layout in which they lie as [B, T, H, D]:
    # the transposition at the end moves nothing.
    turned = [jax.ShapeDtypeStruct([x.shape[n] for n in HEADS_FIRST], x.dtype) for x in arrays]
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in others]
    # XLA's compiler puts the size in when it has made cuDNN's graph.
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    results = jax.ffi.ffi_call(
        f"__cudnn$fmha{'' if record.bias is None else 'ScaleBias'}Softmax{direction}",
        (*turned, *plain, workspace),
        output_layouts=(*[HEADS_FIRST] * len(turned), *[None] * (len(plain) + 1)),
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_description(record, products)),
    )(*operands)
    return (*(x.transpose(HEADS_FIRST) for x in results[: len(turned)]), *results[len(turned) : -1])


def _description(record: TiledAttention, products: dict[str, Any]) -> dict[str, Any]:
    """What XLA's compiler wants to know of a call, in the words of its protocol buffer."""
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    left, right = band(record)
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[record.query.dtype.name],
        "dimensions": [str(n) for n in (b, h, t, s)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
    }
    described = {
        "algorithm": {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True},
        "fmha_scale": record.softmax_scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "NO_MASK" if right is None else "CAUSAL",
        # cuDNN counts the query's own position as one of the window; 0 is no window.
        "sliding_window_length": 0 if left is None else left + 1,
        "max_seg_per_batch": 1,
    }
    for name, ((left_contracted, right_contracted), (left_batch, right_batch)) in products.items():
        described[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left_contracted)],
            "rhs_contracting_dimensions": [str(right_contracted)],
            "lhs_batch_dimensions": [str(n) for n in left_batch],
            "rhs_batch_dimensions": [str(n) for n in right_batch],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": described}
