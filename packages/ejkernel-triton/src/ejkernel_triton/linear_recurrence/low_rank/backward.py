"""Backward pass of recurrences with a low-rank term; the formulas are in the kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.chunked.backward import (
    Gradients,
    gate_gradient_dtype,
    sum_over_head_groups,
    sum_to_field_shape,
)
from ejkernel_triton.linear_recurrence.chunked.forward import zero_padding
from ejkernel_triton.linear_recurrence.low_rank.config import LowRankConfig
from ejkernel_triton.linear_recurrence.low_rank.forward import LowRankResiduals, run_chunks
from ejkernel_triton.linear_recurrence.low_rank.plan import LowRankCall, make_call
from ejkernel_triton.linear_recurrence.spec import state_dtype


@backward_with_plain_states
def backward(pullback: Pullback, config: LowRankConfig) -> Gradients:
    """Returns the gradients of the requested fields of a record with a low-rank term.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals.
        config: Chunks and tiles of both passes.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, grad_fields, residuals = pullback.record, pullback.grad_fields, pullback.private_residuals
    call, is_packed = make_call(record, config), record.cu_seqlens is not None
    if residuals is None:
        _, _, residuals = run_chunks(call, store_residuals=True)
    output_cotangent, final_cotangent = pullback.cotangent
    output_cotangent = output_cotangent.astype(call.record.query.dtype)
    final_cotangent = final_cotangent[None] if is_packed else final_cotangent[:, None]
    initial_gradients, dstates = scan_state_gradients(call, residuals, output_cotangent, final_cotangent)
    dvalue, reads, dreads = value_and_read_gradients(call, residuals, dstates, output_cotangent)
    gate_dtype = gate_gradient_dtype(record, grad_fields) or jnp.float32
    gradients = vector_gradients(call, (reads, dreads, residuals.states, dstates), output_cotangent, gate_dtype)
    gradients["value"] = sum_over_head_groups(dvalue, call.record.value)
    if is_packed:
        gradients = {name: zero_padding(x, call.chunk_tables) for name, x in gradients.items()}
    initial_gradients = initial_gradients[0] if is_packed else initial_gradients[:, 0]
    gradients |= {"initial_state": initial_gradients, "sequence_state": initial_gradients}
    return {name: sum_to_field_shape(gradients[name], getattr(record, name)) for name in sorted(grad_fields)}


def scan_state_gradients(
    call: LowRankCall, residuals: LowRankResiduals, cotangent: jax.Array, final_state_gradients: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the states before the first chunks, [B, NUM_SEQUENCES, H, K, V] float32, and of those
    after all chunks, [B, H, NUM_CHUNKS, K, V] with padded channels.

    Args:
        call: What the launches of the call share.
        residuals: What the forward pass stored.
        cotangent: [B, T, H, V] of the output.
        final_state_gradients: [B, NUM_SEQUENCES, H, K, V], gradients of the final states.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.transition_scan_bwd import transition_scan_bwd_kernel

    record, spec, batch = call.record, call.spec, call.record.query.shape[0]
    initial_gradients, dstates = launch(
        transition_scan_bwd_kernel,
        (
            *(residuals.log2_chunk_decay, residuals.state_readers, residuals.state_products),
            *(cotangent, final_state_gradients, *call.chunk_tables.scan_kernel_inputs),
        ),
        [
            ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            ShapeDtype(call.chunk_blocks(call.block_k, call.block_v), state_dtype(record)),
        ],
        **call.scan_options,
        constants={**call.block_constants, "TILE_V": call.scan_block_v},
    )
    return initial_gradients, dstates


def value_and_read_gradients(
    call: LowRankCall, residuals: LowRankResiduals, dstates: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of values for each state head, [B, T, H, V], the low-rank reads Y, and the gradients of Z
    (letters as in `kernels.chunk_bwd_dvy`).

    Args:
        call: What the launches of the call share.
        residuals: What the forward pass stored.
        dstates: [B, H, NUM_CHUNKS, K, V], gradients of the states after the chunks.
        cotangent: [B, T, H, V] of the output.

    Returns:
        Reads and their gradients are [B, H, NUM_CHUNKS, CHUNK_SIZE, V] with padded channels, in the query's dtype.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_bwd_dvy import chunk_bwd_dvy_kernel

    record, spec, dtype = call.record, call.spec, call.record.query.dtype
    reads_shape = ShapeDtype(call.chunk_blocks(spec.CHUNK_SIZE, call.block_v), dtype)
    dvalue, reads, dreads = launch(
        chunk_bwd_dvy_kernel,
        (
            *call.token_arrays,
            *(call.gate_sum_matrices, residuals.inverse, residuals.states, dstates, cotangent),
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        [
            ShapeDtype(cotangent.shape, record.value.dtype if spec.HV == spec.H else jnp.float32),
            reads_shape,
            reads_shape,
        ],
        **call.chunk_options,
        constants=call.chunk_constants,
    )
    return dvalue, reads, dreads


def vector_gradients(
    call: LowRankCall, chunk_arrays: tuple[jax.Array, ...], cotangent: jax.Array, gate_gradient_dtype: Any
) -> Gradients:
    """Returns the gradients of query, key, decay and both vectors of the low-rank term.

    Args:
        call: What the launches of the call share.
        chunk_arrays: Reads and their gradients of `value_and_read_gradients`, states and their gradients.
        cotangent: [B, T, H, V] of the output.
        gate_gradient_dtype: Dtype of the gradient of the decay.

    Returns:
        Gradients of query and key in their shapes, the others [B, T, H, K].
    """
    record, (reads, dreads, states, dstates) = call.record, chunk_arrays
    dkey, dwrite, *writer_dgates = writer_gradients(call, (reads, dreads, dstates, cotangent))
    readers = reader_gradients(call, (reads, dreads, states, dstates, cotangent, *writer_dgates), gate_gradient_dtype)
    dquery, dread, ddecay = readers
    return {
        "query": sum_over_head_groups(dquery, record.query),
        "key": sum_over_head_groups(dkey, record.key),
        "low_rank_write": dwrite,
        "low_rank_read": dread,
        "decay": ddecay,
    }


def writer_gradients(call: LowRankCall, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the gradients of keys and write vectors for each state head, [B, T, H, K], and their terms of the
    gradients of cumulative gates: per token [B, H, NUM_CHUNKS, CHUNK_SIZE, K], and at the chunk's end [B, H,
    NUM_CHUNKS, K].

    Args:
        call: What the launches of the call share.
        arrays: Reads and their gradients, gradients of states, and the output's cotangent.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_bwd_dka import chunk_bwd_dka_kernel

    spec, batch = call.spec, call.record.query.shape[0]
    return launch(
        chunk_bwd_dka_kernel,
        (*call.token_arrays, call.gate_sum_matrices, *arrays, *call.chunk_tables.chunk_kernel_inputs),
        [
            _vector_gradient_shape(call, "key"),
            _vector_gradient_shape(call, "low_rank_write"),
            ShapeDtype(call.chunk_blocks(spec.CHUNK_SIZE, call.block_k), jnp.float32),
            ShapeDtype((batch, spec.H, spec.NUM_CHUNKS, call.block_k), jnp.float32),
        ],
        **call.chunk_options,
        constants=call.chunk_constants,
    )


def reader_gradients(
    call: LowRankCall, arrays: tuple[jax.Array, ...], gate_gradient_dtype: Any
) -> tuple[jax.Array, ...]:
    """Returns the gradients of queries for each state head, of read vectors and of gates, [B, T, H, K].

    Args:
        call: What the launches of the call share.
        arrays: Reads and their gradients, states and their gradients, the output's cotangent, and the terms of the
            gates' gradient of `writer_gradients`.
        gate_gradient_dtype: Dtype of the gradient of the gates.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_bwd_dqb import chunk_bwd_dqb_kernel

    spec, batch = call.spec, call.record.query.shape[0]
    return launch(
        chunk_bwd_dqb_kernel,
        (*call.token_arrays, call.gate_sum_matrices, *arrays, *call.chunk_tables.chunk_kernel_inputs),
        [
            _vector_gradient_shape(call, "query"),
            _vector_gradient_shape(call, "low_rank_read"),
            ShapeDtype((batch, spec.T, spec.H, spec.K), gate_gradient_dtype),
        ],
        **call.chunk_options,
        constants=call.chunk_constants,
    )


def _vector_gradient_shape(call: LowRankCall, name: str) -> ShapeDtype:
    """Returns the shape and dtype of the gradient of a field for each state head. It is float32 if heads share the
    field: XLA then sums over them.
    """
    spec, field = call.spec, getattr(call.record, name)
    shape = (field.shape[0], spec.T, spec.H, spec.K)
    return ShapeDtype(shape, field.dtype if field.shape[2] == spec.H else jnp.float32)
