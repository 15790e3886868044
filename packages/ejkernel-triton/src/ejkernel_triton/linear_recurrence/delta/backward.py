"""Backward pass of the delta rule in Triton; the formulas are in `kernels.chunk_bwd_dhu`."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.chunked.backward import (
    Gradients,
    gate_gradient_dtype,
    sum_over_head_groups,
    sum_to_field_shape,
    zero_padding_gradients,
)
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.delta.config import DeltaRuleConfig
from ejkernel_triton.linear_recurrence.delta.forward import (
    DeltaResiduals,
    chunk_states,
    compute_segment_states,
    delta_config,
    replace_arrays,
    tokens_per_chunk,
    wy_form,
)
from ejkernel_triton.linear_recurrence.delta.plan import (
    key_heads_summed_per_program,
    key_kernel_shapes,
    state_gradient_stages,
)
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, make_call, make_gate_sum_matrices
from ejkernel_triton.linear_recurrence.segments.forward import delta_initial_states, find_chunks_until_decayed
from ejkernel_triton.linear_recurrence.segments.plan import plan_sub_segments
from ejkernel_triton.linear_recurrence.spec import state_dtype
from ejkernel_triton.sizes import pad_to_power_of_two


class StateGradients(NamedTuple):
    """The results of passing gradients of states from the last chunk to the first.

    Attributes:
        dstates: [B, H, NUM_CHUNKS, K, V], gradients of the states after the chunks.
        initial_dstates: [B, NUM_SEQUENCES, H, K, V] float32, gradients of the states before the first chunks.
        dv_new: [B, T, H, V], gradients of the tokens' writes.
    """

    dstates: jax.Array
    initial_dstates: jax.Array
    dv_new: jax.Array


@backward_with_plain_states
def backward(pullback: Pullback, config: DeltaRuleConfig) -> Gradients:
    """Returns the gradients of the requested fields of a record with beta.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals.
        config: Chunks and tiles of both passes.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, grad_fields, residuals = pullback.record, pullback.grad_fields, pullback.private_residuals
    if residuals.wy is None:
        # The WY form and the inverse are recomputed, since the forward pass did not store them.
        wy, call = wy_form(record, config, config.backward_chunk, store_inverse=True)
        residuals = residuals._replace(wy=wy)
    else:
        call = make_call(record, config, tokens_per_chunk(record, config.backward_chunk), compute_gate_cumsum=False)
        call = replace_arrays(call, residuals.call_arrays)
    if residuals.segment_states is None:
        residuals = residuals._replace(
            segment_states=compute_segment_states(record, call, residuals.wy, keep_transitions=True)
        )
    if residuals.states is None:
        states, _, value = chunk_states(record, call, residuals.wy, residuals.segment_states)
        residuals = residuals._replace(states=states, value=value)
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    gradients = _gradients_of_all_fields(
        record, call, residuals, cotangent, pullback.cotangent[1], gate_gradient_dtype(record, grad_fields)
    )
    if record.cu_seqlens is not None:
        gradients = zero_padding_gradients(call, gradients)
    return {name: sum_to_field_shape(gradients[name], getattr(record, name)) for name in sorted(grad_fields)}


def _gradients_of_all_fields(
    record: LinearRecurrence,
    call: RecurrenceCall,
    residuals: DeltaResiduals,
    cotangent: jax.Array,
    final_cotangent: jax.Array,
    dgates_dtype: Any,
) -> Gradients:
    """Returns the gradients of all fields; the gradient of the gates is unused if `dgates_dtype` is None."""
    assert record.beta is not None  # `Requires` ensures it
    assert residuals.wy is not None  # the caller ensures it
    state_gradients = _state_gradients(record, call, residuals, cotangent, final_cotangent)
    dvalue, dy, dbeta = gradients_through_inverse(call, record.beta, residuals.wy.inverse, state_gradients.dv_new)
    # Only this kernel reads queries and keys without their decay.
    undecayed_call = (
        make_call(record, call.config, call.spec.CHUNK_SIZE, compute_gate_cumsum=False)
        if call.spec.QK_ARE_DECAYED
        else call
    )
    dquery, dkey, dgates, dbeta_of_keys = key_gradients(
        dataclasses.replace(undecayed_call, value=residuals.value),
        record.beta,
        cotangent,
        dy,
        (cast(jax.Array, residuals.states), state_gradients.dstates),
        dgates_dtype=dgates_dtype,
    )
    initial_gradients = (
        state_gradients.initial_dstates[0] if record.cu_seqlens is not None else state_gradients.initial_dstates[:, 0]
    )
    return {
        "query": dquery,
        "key": dkey,
        "value": dvalue,
        "decay": dgates,
        "beta": dbeta + dbeta_of_keys,
        "initial_state": initial_gradients,
        "sequence_state": initial_gradients,
    }


def _state_gradients(
    record: LinearRecurrence,
    call: RecurrenceCall,
    residuals: DeltaResiduals,
    cotangent: jax.Array,
    final_cotangent: jax.Array,
) -> StateGradients:
    """Returns gradients of states, from the last chunk of each sequence or segment to the first."""
    assert residuals.wy is not None  # the caller ensures both
    assert residuals.segment_states is not None
    intra_chunk_dv = chunk_bwd_dv_local(call, cotangent)

    w, segments = residuals.wy.w, residuals.segment_states

    final_state_gradients = final_cotangent[None] if record.cu_seqlens is not None else final_cotangent[:, None]
    if segments.end_states is not None:
        sub_segment_plan = plan_sub_segments(call.spec, reverse=True, row_starts_from_zeros=False)
        spec = dataclasses.replace(
            call.spec,
            NUM_SEQUENCES=sub_segment_plan.num_scanned_sub_segments,
            CHUNKS_PER_SEGMENT=sub_segment_plan.chunks_per_sub_segment,
        )
        chunks_until_decayed = find_chunks_until_decayed(call, w, sub_segment_plan)
        scan_call = dataclasses.replace(call, spec=spec)
        end_gradients_of_segments = compute_segment_start_gradients(
            scan_call, w, cotangent, intra_chunk_dv, chunks_until_decayed
        )
        final_state_gradients = delta_initial_states(
            call.spec,
            sub_segment_plan,
            end_gradients_of_segments,
            segments.end_states,
            final_cotangent,
            segments.passes_state,
        )
    return pass_state_gradients(call, w, cotangent, intra_chunk_dv, final_state_gradients, state_dtype(record))


def chunk_bwd_dv_local(call: RecurrenceCall, cotangent: jax.Array) -> jax.Array:
    """Returns the intra-chunk term of `StateGradients.dv_new`, [B, T, H, V] in the cotangent's dtype."""
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dv_local import chunk_bwd_dv_local_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    (intra_chunk_dv,) = launch(
        chunk_bwd_dv_local_kernel,
        (call.query, call.key, call.gates, call.scores, cotangent, *call.chunk_tables.chunk_kernel_inputs),
        [ShapeDtype((batch, spec.T, spec.H, spec.V), cotangent.dtype)],
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * spec.H,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={"spec": spec, "BLOCK_K": config.output_block_k, "BLOCK_V": config.output_block_v},
    )
    return intra_chunk_dv


def pass_state_gradients(
    call: RecurrenceCall,
    w: jax.Array,
    cotangent: jax.Array,
    intra_chunk_dv: jax.Array,
    final_state_gradients: jax.Array,
    dtype: Any,
) -> StateGradients:
    """Returns the gradients of the states between chunks.

    Args:
        call: What the launches of the call share; with gates per key channel, with decayed queries and keys.
        w: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        intra_chunk_dv: [B, T, H, V] from `chunk_bwd_dv_local`.
        final_state_gradients: [B, NUM_SEQUENCES, H, K, V], gradients of the final states.
        dtype: Dtype of the gradients of states.
    """
    spec, batch = call.spec, call.query.shape[0]
    dstates_shape, dv_new_shape = (batch, spec.H, spec.NUM_CHUNKS, spec.K, spec.V), (batch, spec.T, spec.H, spec.V)
    return _launch_chunk_bwd_dhu(
        call,
        (w, cotangent, intra_chunk_dv, final_state_gradients, None),
        ShapeDtype(dstates_shape, dtype),
        dv_new_shape,
    )


def compute_segment_start_gradients(
    call: RecurrenceCall,
    w: jax.Array,
    cotangent: jax.Array,
    intra_chunk_dv: jax.Array,
    chunks_until_decayed: jax.Array | None,
) -> jax.Array:
    """Returns the gradients of the states before segments, from scans that start with zeros at the segments' ends.

    Args:
        call: What the launches of the call share; its sequences are the scanned segments, the last ones of the row.
        w: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        intra_chunk_dv: [B, T, H, V] from `chunk_bwd_dv_local`.
        chunks_until_decayed: How many chunks gradients span, from `forward.find_chunks_until_decayed`; None if not
            known.

    Returns:
        [B, NUM_SEQUENCES, H, K, V] float32.
    """
    call = dataclasses.replace(call, config=_segment_start_gradient_config(delta_config(call)))
    empty_shape = (call.query.shape[0],)
    arrays = (w, cotangent, intra_chunk_dv, None, chunks_until_decayed)
    return _launch_chunk_bwd_dhu(call, arrays, ShapeDtype(empty_shape, jnp.float32), empty_shape).initial_dstates


def _launch_chunk_bwd_dhu(
    call: RecurrenceCall, arrays: tuple[Any, ...], dstates_shape: ShapeDtype, dv_new_shape: tuple[int, ...]
) -> StateGradients:
    """Launches `chunk_bwd_dhu_kernel`.

    Args:
        call: What the launches of the call share.
        arrays: w, cotangent, within, final and lengths. Without final only the gradients at the end of scans are
            stored.
        dstates_shape: The gradients of states.
        dv_new_shape: Shape of the gradients of the tokens' writes.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dhu import chunk_bwd_dhu_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    *token_arrays, final_state_gradients, chunks_until_decayed = arrays
    outputs = launch(
        chunk_bwd_dhu_kernel,
        (
            call.query,
            call.key,
            call.gates,
            *token_arrays,
            final_state_gradients,
            *call.chunk_tables.scan_kernel_inputs,
            chunks_until_decayed,
        ),
        [
            dstates_shape,
            ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            ShapeDtype(dv_new_shape, call.query.dtype),
        ],
        batch=batch,
        grid=batch * spec.NUM_SEQUENCES * spec.H * cdiv(spec.V, config.dh_block_v),
        num_warps=config.dh_warps,
        num_stages=state_gradient_stages(call),
        constants={
            "spec": spec,
            "BLOCK_K": pad_to_power_of_two(spec.K, MIN_TILE),
            "BLOCK_V": config.dh_block_v,
            "HAS_FINAL_STATE_GRADIENTS": final_state_gradients is not None,
            "STORE_CHUNK_STATES": final_state_gradients is not None,
            "FIRST_SCANNED_SEGMENT": cdiv(spec.NUM_CHUNKS, spec.CHUNKS_PER_SEGMENT) - spec.NUM_SEQUENCES
            if spec.CHUNKS_PER_SEGMENT
            else 0,
            "NUM_TILES_OF_CHUNKS_UNTIL_DECAYED": 0 if chunks_until_decayed is None else chunks_until_decayed.shape[3],
        },
    )
    return StateGradients(*outputs)


def _segment_start_gradient_config(config: DeltaRuleConfig) -> DeltaRuleConfig:
    """Returns a configuration for two programs per multiprocessor, as in `stages.end_states`."""
    return dataclasses.replace(config, dh_block_v=min(config.dh_block_v, 32))


def gradients_through_inverse(
    call: RecurrenceCall, beta: jax.Array, inverse: jax.Array, dv_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients through the inverse.

    Args:
        call: What the launches of the call share.
        beta: [B, T, H].
        inverse: (I + L)^-1, from `forward.WYForm`.
        dv_new: Gradients of the tokens' writes, from `StateGradients`.

    Returns:
        Gradient of value in its shape and dtype; dy [B, T, H, V], that gradient without the factor beta; [B, T, H]
        float32, the values' term of beta's gradient.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_bwd import wy_bwd_kernel

    spec, config, batch, value = call.spec, call.config, call.query.shape[0], call.value
    tokens = (batch, spec.T, spec.H, spec.V)
    dy, dvalue, dbeta = launch(
        wy_bwd_kernel,
        (value, beta, inverse, dv_new, *call.chunk_tables.chunk_kernel_inputs),
        [
            ShapeDtype(tokens, dv_new.dtype),
            ShapeDtype(tokens, value.dtype if spec.HV == spec.H else jnp.float32),
            ShapeDtype(tokens[:3], jnp.float32),
        ],
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * spec.H,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={"spec": spec, "BLOCK_V": config.output_block_v},
    )
    return sum_over_head_groups(dvalue, value), dy, dbeta


def key_gradients(
    call: RecurrenceCall,
    beta: jax.Array,
    cotangent: jax.Array,
    dy: jax.Array,
    states: tuple[jax.Array, jax.Array],
    *,
    dgates_dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of query, key and gates, and the keys' term of beta's gradient.

    Args:
        call: What the launches of the call share, with the tokens' writes in place of their values.
        beta: [B, T, H].
        cotangent: [B, T, H, V] of the output.
        dy: [B, T, H, V] from `gradients_through_inverse`.
        states: [B, H, NUM_CHUNKS, K, V], those before the chunks, and the gradients of those after them.
        dgates_dtype: Dtype of the gradient of the gates; None if it is not requested.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, [B, T, H, GATE_CHANNELS] of the log gates, and [B, T, H].
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dqkwg import chunk_bwd_dqkwg_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    num_tiles = cdiv(spec.K, config.gradient_block_k)
    heads_per_program = key_heads_summed_per_program(spec, batch * spec.NUM_CHUNKS * num_tiles)
    dquery, dkey, _, _, dgates, dbeta = launch(
        chunk_bwd_dqkwg_kernel,
        (
            *(call.query, call.key, call.value, call.gates, call.decay, beta),
            *(cotangent, dy, *states, make_gate_sum_matrices(call)),
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        key_kernel_shapes(call, heads_per_program, num_tiles, dgates_dtype),
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * (spec.H // heads_per_program) * num_tiles,
        num_warps=config.gradient_warps,
        num_stages=config.gradient_stages,
        constants={
            "spec": spec,
            "T": 1 if call.decay is None else call.decay.shape[1],
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "HEADS_PER_PROGRAM": heads_per_program,
            "COMPUTE_GATE_GRADIENTS": dgates_dtype is not None,
        },
    )
    if dgates_dtype is not None and spec.GATE_CHANNELS == 1:
        dgates = dgates.sum(1)[..., None]
    return sum_over_head_groups(dquery, call.query), sum_over_head_groups(dkey, call.key), dgates, dbeta.sum(1)
