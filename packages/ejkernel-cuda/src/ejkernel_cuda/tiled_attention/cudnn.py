"""cuDNN's fused attention, called as XLA calls it.

`jax.nn.dot_product_attention` rounds the logarithm of the denominator to the query's dtype, and its backward pass takes
no other's residuals. So this makes the custom calls itself, which XLA's compiler replaces by cuDNN graphs.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention, band
from ejkernel.planning.batch_rows import in_rows
from ejkernel.types.pullback import Pullback

HEADS_FIRST = (0, 2, 1, 3)
"""Permutation between [B, T, H, D], which arrays have, and [B, H, T, D], which the calls' results are said to have."""

# The products of attention by name: contracted and batch axes of both operands, as arrays lie in memory.
FORWARD_PRODUCTS = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


MASKED = {"bfloat16": -1e30, "float16": -6e4}
"""A bias so low that its weight is 0 next to any other; both dtypes hold it."""


def forward(record: TiledAttention, config: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Output [B, T, H, Dv] and lse [B, H, T]."""
    if record.bias is None:
        return _run(record)
    attends = _rows_that_attend(record)
    output, residuals = _run(_finite(record))
    lse = jnp.where(attends, residuals.lse, -jnp.inf)
    return jnp.where(attends.swapaxes(1, 2)[..., None], output, 0), SoftmaxResiduals(lse=lse)


def _rows_that_attend(record: TiledAttention) -> jax.Array:
    """Whether a query attends to any key, bool [B|1, H|1, T], of a record with a bias: -inf masks."""
    assert record.bias is not None  # the caller looked
    left, right = band(record)
    steps = jnp.arange(record.key.shape[1]) - jnp.arange(record.query.shape[1])[:, None]
    seen = record.bias > -jnp.inf
    seen = seen if left is None else seen & (steps >= -left)
    return jnp.any(seen if right is None else seen & (steps <= right), axis=-1)


def _finite(record: TiledAttention) -> TiledAttention:
    """The record with a bias without -inf: in a row of nothing else, cuDNN's softmax is free to divide 0 by 0."""
    assert record.bias is not None  # the caller looked
    bias = jnp.where(record.bias == -jnp.inf, MASKED[record.bias.dtype.name], record.bias)
    return dataclasses.replace(record, bias=bias.astype(record.bias.dtype))


def _run(record: TiledAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    inputs = {"query": record.query, "key": record.key, "value": record.value}
    given = inputs if record.bias is None else {**inputs, "bias": record.bias}

    def run(given: dict[str, jax.Array], rows: int) -> tuple[jax.Array, ...]:
        # `in_rows` leaves an operand that all rows share with one row. cuDNN takes that of a bias alone.
        broadcast = {name: jnp.broadcast_to(given[name], (rows, *given[name].shape[1:])) for name in inputs}
        return _forward(dataclasses.replace(record, **{**given, **broadcast}))

    output, lse = in_rows(run, given, record.query.shape[0])
    return output, SoftmaxResiduals(lse=lse)


def _forward(record: TiledAttention) -> tuple[jax.Array, ...]:
    b, t, h, _ = record.query.shape
    output = jax.ShapeDtypeStruct((b, t, h, record.value.shape[-1]), record.query.dtype)
    lse = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    return _call(record, "", FORWARD_PRODUCTS, _present(*_inputs(record), record.bias), (output,), (lse,))


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Gradients of query, key, value and bias."""
    record: TiledAttention = pullback.record
    lse = pullback.residuals.lse
    if record.bias is not None:
        # Rows that attend to nothing have lse -inf. With 0, their weights exp(s - lse) are 0, and all gradients too.
        record, lse = _finite(record), jnp.where(lse == -jnp.inf, 0, lse)
    saved = (lse, pullback.cotangent)
    # The order of XLA's custom call: the output comes after the bias.
    operands = _present(*_inputs(record), *saved, record.bias, pullback.output)
    made = _call(record, "Backward", BACKWARD_PRODUCTS, operands, _inputs(record), _present(record.bias))
    # Not strict: without a bias there is no gradient of it.
    return dict(zip(("query", "key", "value", "bias"), made, strict=False))


def _inputs(record: TiledAttention) -> tuple[jax.Array, ...]:
    return record.query, record.key, record.value


def _present(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in arrays if x is not None)


def _call(
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
