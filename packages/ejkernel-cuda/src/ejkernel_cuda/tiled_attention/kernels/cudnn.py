"""cuDNN's fused attention, through the custom calls that XLA's compiler replaces by cuDNN graphs.

`jax.nn.dot_product_attention` emits them too, but rounds the logarithm of the denominator to the query's dtype, and its
backward pass accepts only its own residuals.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds

HEADS_FIRST_PERMUTATION = (0, 2, 1, 3)
"""The permutation between [B, T, H, D], the arrays' layout, and [B, H, T, D], the declared shape of the calls'
results.
"""

MASKING_BIAS = {"bfloat16": -1e30, "float16": -6e4}
"""A bias so low that its weight is 0 next to any other one, and finite in the dtype."""


def replace_infinite_bias(record: TiledAttention) -> TiledAttention:
    """Returns the record with -inf in the bias replaced. In a row whose biases are all -inf, cuDNN's softmax may divide
    0 by 0.
    """
    assert record.bias is not None  # checked by the caller
    bias = jnp.where(record.bias == -jnp.inf, MASKING_BIAS[record.bias.dtype.name], record.bias)
    return dataclasses.replace(record, bias=bias.astype(record.bias.dtype))


def query_key_value(record: TiledAttention) -> tuple[jax.Array, ...]:
    """Returns the query, key and value of a record, unchanged."""
    return record.query, record.key, record.value


def drop_none(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns the arrays that are not None."""
    return tuple(x for x in arrays if x is not None)


def emit_custom_call(
    record: TiledAttention,
    direction: str,
    product_dimensions: dict[str, Any],
    operands: tuple[jax.Array, ...],
    attention_result_shapes: tuple[Any, ...],
    other_result_shapes: tuple[Any, ...],
) -> tuple[jax.Array, ...]:
    """Emits one of XLA's custom calls for cuDNN.

    Args:
        record: The call's record.
        direction: The last word of the custom call's name.
        product_dimensions: The matrix products in it.
        operands: Its operands.
        attention_result_shapes: Arrays with the shapes and dtypes of the results of shape [B, T, H, D].
        other_result_shapes: Arrays with the shapes and dtypes of the other results.

    Returns:
        The results, in that order.
    """
    # XLA's pass expects results of shape [B, H, T, D]; the declared layout stores them as [B, T, H, D], so that the
    # transposition at the end moves no data.
    heads_first_shapes = [
        jax.ShapeDtypeStruct([x.shape[n] for n in HEADS_FIRST_PERMUTATION], x.dtype) for x in attention_result_shapes
    ]
    other_shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in other_result_shapes]
    # XLA's compiler replaces this size once it has built cuDNN's graph.
    workspace_shape = jax.ShapeDtypeStruct((0,), jnp.uint8)
    results = jax.ffi.ffi_call(
        f"__cudnn$fmha{'' if record.bias is None else 'ScaleBias'}Softmax{direction}",
        (*heads_first_shapes, *other_shapes, workspace_shape),
        output_layouts=(*[HEADS_FIRST_PERMUTATION] * len(heads_first_shapes), *[None] * (len(other_shapes) + 1)),
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_backend_config(record, product_dimensions)),
    )(*operands)
    return (
        *(x.transpose(HEADS_FIRST_PERMUTATION) for x in results[: len(heads_first_shapes)]),
        *results[len(heads_first_shapes) : -1],
    )


def _backend_config(record: TiledAttention, product_dimensions: dict[str, Any]) -> dict[str, Any]:
    """Returns the call's description, with the fields of the protocol buffer that XLA's compiler reads."""
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    left, right = causal_window_bounds(record)
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[record.query.dtype.name],
        "dimensions": [str(n) for n in (b, h, t, s)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
    }
    backend_config = {
        "algorithm": {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True},
        "fmha_scale": record.softmax_scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "NO_MASK" if right is None else "CAUSAL",
        # cuDNN's window counts the query's own position; 0 means no window.
        "sliding_window_length": 0 if left is None else left + 1,
        "max_seg_per_batch": 1,
    }
    for name, ((left_contracted, right_contracted), (left_batch, right_batch)) in product_dimensions.items():
        backend_config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left_contracted)],
            "rhs_contracting_dimensions": [str(right_contracted)],
            "lhs_batch_dimensions": [str(n) for n in left_batch],
            "rhs_batch_dimensions": [str(n) for n in right_batch],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": backend_config}
