"""The FFI calls of the backward pass with gates per key channel (csrc/delta_rule/channel_reverse.cuh and
channel_token_gradients.cuh).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, final_states_shape
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.channel_gates.forward import (
    ScanResiduals,
    early_steps_result,
    float32_or_empty,
    log_gates,
    prepare_chunks,
    run_forward,
)
from ejkernel_cuda.delta_rule.plan import chunk_table, num_chunks, num_segments, scan_handler
from ejkernel_cuda.library import register_handler


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals; without these, the forward pass runs again.
        config: Unused: the kernels have no options.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: LinearRecurrence = pullback.record
    residuals: ScanResiduals | None = pullback.private_residuals
    if residuals is None:
        residuals = run_forward(record, stores=True)[2]
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    dwrites, dstates, dinitial = state_gradients(record, cotangent, pullback.cotangent[1])
    gradients = token_gradients(record, residuals, cotangent, dwrites, dstates)
    if record.beta is None:
        gradients["value"] = dwrites
    gradients["initial_state" if record.cu_seqlens is None else "sequence_state"] = dinitial
    return {name: _sum_to_field(gradients[name], getattr(record, name)) for name in sorted(pullback.grad_fields)}


def state_gradients(
    record: LinearRecurrence, cotangent: jax.Array, final_cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of values [B, T, H, V], of the states after the chunks [B, H, chunks, V, K], and of the
    initial states [B, H, K, V]. With the delta rule, the first are not yet multiplied by beta.
    """
    (rows, _, heads, columns), keys, dtype = cotangent.shape, record.query.shape[3], cotangent.dtype
    segments = num_segments(record)
    call = jax.ffi.ffi_call(
        register_handler(scan_handler("ejkernel_channel_scan_reverse", record, segments)),
        (
            jax.ShapeDtypeStruct(cotangent.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, num_chunks(record), columns, keys), dtype),
            jax.ShapeDtypeStruct(final_states_shape(record), jnp.float32),
            early_steps_result(record, segments),
        ),
        vmap_method="sequential",
    )
    final_cotangent = final_cotangent.astype(jnp.float32)
    inputs = (*prepare_chunks(record), cotangent, float32_or_empty(record.beta), final_cotangent, chunk_table(record))
    scale, segments = np.float32(record.softmax_scale), np.int32(segments)
    dwrites, dstates, dinitial, _ = call(*inputs, scale=scale, segments=segments)
    return dwrites, dstates, dinitial


def row_states(
    record: LinearRecurrence, output_cotangent: jax.Array | None, final_states_cotangent: jax.Array | None
) -> jax.Array | None:
    """Returns the gradients of the states before rows by the reverse scan alone, of any multiple of 64 value channels;
    None for the states after them, which the forward pass gives.

    Args:
        record: The canonical arguments of rows that are not packed.
        output_cotangent: [B, T, H, V], of which the gradients are taken; None for the states.
        final_states_cotangent: [B, H, K, V], cotangent of the states after the rows; None for zeros.
    """
    if output_cotangent is None:
        return None
    if final_states_cotangent is None:
        final_states_cotangent = jnp.zeros(final_states_shape(record), jnp.float32)
    return state_gradients(record, output_cotangent.astype(record.query.dtype), final_states_cotangent)[2]


def token_gradients(
    record: LinearRecurrence,
    residuals: ScanResiduals,
    cotangent: jax.Array,
    dwrites: jax.Array,
    dstates: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the gradients of queries, keys and gates, and with the delta rule of values and beta; all of them per
    head of the call, those of queries and keys in float32 where heads share them.
    """
    gates, beta = log_gates(record), float32_or_empty(record.beta)
    (rows, tokens, heads, _), keys, has_delta = cotangent.shape, record.query.shape[3], record.beta is not None

    def per_head(field: jax.Array) -> jax.ShapeDtypeStruct:
        dtype = field.dtype if field.shape[2] == heads else jnp.float32
        return jax.ShapeDtypeStruct((rows, tokens, heads, keys), dtype)

    call = jax.ffi.ffi_call(
        register_handler("ejkernel_channel_token_gradients"),
        (
            per_head(record.query),
            per_head(record.key),
            jax.ShapeDtypeStruct(cotangent.shape if has_delta else (0,), record.value.dtype),
            jax.ShapeDtypeStruct(gates.shape, jnp.float32),
            # Each block has half of the key channels.
            jax.ShapeDtypeStruct((2, *beta.shape) if has_delta else (0,), jnp.float32),
        ),
        vmap_method="sequential",
    )
    writes = residuals.writes if has_delta else record.value
    inputs = (record.query, record.key, record.value, writes, cotangent, dwrites, residuals.states, dstates)
    dquery, dkey, dvalue, dgates, dbeta = call(
        *inputs, gates, beta, chunk_table(record), scale=np.float32(record.softmax_scale)
    )
    gradients = {"query": dquery, "key": dkey, "decay": dgates}
    return gradients | ({"value": dvalue, "beta": dbeta.sum(0)} if has_delta else {})


def _sum_to_field(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Returns a gradient in a field's shape and dtype: sums over heads that share it, and over axes of size 1."""
    if gradient.ndim == 4 and field.shape[2] not in (1, gradient.shape[2]):
        gradient = gradient.reshape(*gradient.shape[:2], field.shape[2], -1, gradient.shape[3]).sum(3)
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field.dtype)
