"""Backward pass of the delta rule in Triton; the formulas are in `kernels.chunk_bwd_dhu`."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import with_plain_state_gradients
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.chunked.backward import (
    Gradients,
    gate_dtype,
    over_groups,
    sum_to_shape,
    zero_padding_gradients,
)
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.delta.config import DeltaPasses
from ejkernel_triton.linear_recurrence.delta.forward import (
    DeltaResiduals,
    chunk_states,
    delta_config,
    segment_states,
    tokens_of_chunk,
    with_arrays,
    wy_form,
)
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, gate_signs, make_call
from ejkernel_triton.linear_recurrence.segments.forward import delta_initial_states, effective_lengths
from ejkernel_triton.linear_recurrence.segments.plan import split_segments
from ejkernel_triton.linear_recurrence.spec import state_dtype
from ejkernel_triton.sizes import (
    padded,
)


class StateGradients(NamedTuple):
    """The results of passing gradients of states from the last chunk to the first.

    Attributes:
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.
        first: [B, SEQUENCES, H, K, V] float32, gradients of the states before the first chunks.
        dv_new: [B, T, H, V], gradients of the tokens' writes.
    """

    dstates: jax.Array
    first: jax.Array
    dv_new: jax.Array


@with_plain_state_gradients
def backward(pullback: Pullback, config: DeltaPasses) -> Gradients:
    """Returns the gradients of the requested fields of a record with beta.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals.
        config: Chunks and tiles of both passes.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, grad_fields, private = pullback.record, pullback.grad_fields, pullback.private_residuals
    if private.wy is None:
        # The WY form and the inverse are recomputed, since the forward pass did not store them.
        wy, call = wy_form(record, config, config.backward_chunk, keep=True)
        private = private._replace(wy=wy)
    else:
        call = make_call(record, config, tokens_of_chunk(record, config.backward_chunk), cumulative=False)
        call = with_arrays(call, private.arrays)
    if private.segments is None:
        private = private._replace(segments=segment_states(record, call, private.wy, keep=True))
    if private.states is None:
        states, _, value = chunk_states(record, call, private.wy, private.segments)
        private = private._replace(states=states, value=value)
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    gradients = _gradients(record, call, private, cotangent, pullback.cotangent[1], gate_dtype(record, grad_fields))
    if record.cu_seqlens is not None:
        gradients = zero_padding_gradients(call, gradients)
    return {name: sum_to_shape(gradients[name], getattr(record, name)) for name in sorted(grad_fields)}


def _gradients(
    record: LinearRecurrence,
    call: RecurrenceCall,
    made: DeltaResiduals,
    cotangent: jax.Array,
    final: jax.Array,
    gates: Any,
) -> Gradients:
    """Returns the gradients of all fields; the gradient of the gates is unused if `gates` is None."""
    assert record.beta is not None  # `Requires` ensures it
    assert made.wy is not None  # the caller ensures it
    state_gradients = _state_gradients(record, call, made, cotangent, final)
    dvalue, dy, dbeta = inverse_gradients(call, record.beta, made.wy.inverse, state_gradients.dv_new)
    # Only this kernel reads queries and keys without their decay.
    raw = make_call(record, call.config, call.spec.CHUNK, cumulative=False) if call.spec.DECAYED else call
    dquery, dkey, dgates, more = key_gradients(
        dataclasses.replace(raw, value=made.value),
        record.beta,
        cotangent,
        dy,
        (cast(jax.Array, made.states), state_gradients.dstates),
        gates=gates,
    )
    first = state_gradients.first[0] if record.cu_seqlens is not None else state_gradients.first[:, 0]
    return {
        "query": dquery,
        "key": dkey,
        "value": dvalue,
        "decay": dgates,
        "beta": dbeta + more,
        "initial_state": first,
        "sequence_state": first,
    }


def _state_gradients(
    record: LinearRecurrence, call: RecurrenceCall, made: DeltaResiduals, cotangent: jax.Array, final: jax.Array
) -> StateGradients:
    """Returns gradients of states, from the last chunk of each sequence or segment to the first."""
    assert made.wy is not None  # the caller ensures both
    assert made.segments is not None
    within = chunk_bwd_dv_local(call, cotangent)

    w, found = made.wy.w, made.segments

    last = final[None] if record.cu_seqlens is not None else final[:, None]
    if found.ends is not None:
        split = split_segments(call.spec, reverse=True, zero_start=False)
        spec = dataclasses.replace(call.spec, SEQUENCES=split.scans, PER_SEQUENCE=split.chunks)
        lengths = effective_lengths(call, w, split)
        scans = dataclasses.replace(call, spec=spec)
        ends = end_gradients(scans, w, cotangent, within, lengths)
        last = delta_initial_states(call.spec, split, ends, found.ends, final, found.used)
    return pass_state_gradients(call, w, cotangent, within, last, state_dtype(record))


def chunk_bwd_dv_local(call: RecurrenceCall, cotangent: jax.Array) -> jax.Array:
    """Returns the intra-chunk term of `StateGradients.dv_new`, [B, T, H, V] in the cotangent's dtype."""
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dv_local import chunk_bwd_dv_local_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    (made,) = launch(
        chunk_bwd_dv_local_kernel,
        (call.query, call.key, call.gates, call.scores, cotangent, *call.chunk_index.per_chunk),
        [Shape((batch, spec.T, spec.H, spec.V), cotangent.dtype)],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={"spec": spec, "BLOCK_K": config.output_block_k, "BLOCK_V": config.output_block_v},
    )
    return made


def pass_state_gradients(
    call: RecurrenceCall,
    w: jax.Array,
    cotangent: jax.Array,
    within: jax.Array,
    final: jax.Array,
    dtype: Any,
) -> StateGradients:
    """Returns the gradients of the states between chunks.

    Args:
        call: What the launches of the call share; with gates per key channel, with decayed queries and keys.
        w: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        within: [B, T, H, V] from `chunk_bwd_dv_local`.
        final: [B, SEQUENCES, H, K, V], gradients of the final states.
        dtype: Dtype of the gradients of states.
    """
    spec, batch = call.spec, call.query.shape[0]
    states, tokens = (batch, spec.H, spec.CHUNKS, spec.K, spec.V), (batch, spec.T, spec.H, spec.V)
    return _chunk_bwd_dhu(call, (w, cotangent, within, final, None), Shape(states, dtype), tokens)


def end_gradients(
    call: RecurrenceCall,
    w: jax.Array,
    cotangent: jax.Array,
    within: jax.Array,
    lengths: jax.Array | None,
) -> jax.Array:
    """Returns the gradients of the states before segments, from scans that start with zeros at the segments' ends.

    Args:
        call: What the launches of the call share; its sequences are the scanned segments, the last ones of the row.
        w: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        within: [B, T, H, V] from `chunk_bwd_dv_local`.
        lengths: How many chunks gradients span, from `forward.effective_lengths`; None if not known.

    Returns:
        [B, SEQUENCES, H, K, V] float32.
    """
    call = dataclasses.replace(call, config=_end_gradient_config(delta_config(call)))
    nothing = (call.query.shape[0],)
    arrays = (w, cotangent, within, None, lengths)
    return _chunk_bwd_dhu(call, arrays, Shape(nothing, jnp.float32), nothing).first


def _chunk_bwd_dhu(
    call: RecurrenceCall, arrays: tuple[Any, ...], states: Shape, tokens: tuple[int, ...]
) -> StateGradients:
    """Launches `chunk_bwd_dhu_kernel`.

    Args:
        call: What the launches of the call share.
        arrays: w, cotangent, within, final and lengths. Without final only the gradients at the end of scans are
            stored.
        states: The gradients of states.
        tokens: Shape of the gradients of the tokens' writes.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dhu import chunk_bwd_dhu_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    *given, final, lengths = arrays
    made = launch(
        chunk_bwd_dhu_kernel,
        (call.query, call.key, call.gates, *given, final, *call.chunk_index.per_scan, lengths),
        [
            states,
            Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            Shape(tokens, call.query.dtype),
        ],
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * cdiv(spec.V, config.dh_block_v),
        num_warps=config.dh_warps,
        num_stages=_state_gradient_stages(call),
        constants={
            "spec": spec,
            "BLOCK_K": padded(spec.K, MIN_TILE),
            "BLOCK_V": config.dh_block_v,
            "FINAL": final is not None,
            "WRITE": final is not None,
            "OFFSET": cdiv(spec.CHUNKS, spec.PER_SEQUENCE) - spec.SEQUENCES if spec.PER_SEQUENCE else 0,
            "LENGTH_TILES": 0 if lengths is None else lengths.shape[3],
        },
    )
    return StateGradients(*made)


def _end_gradient_config(config: DeltaPasses) -> DeltaPasses:
    """Returns a configuration for two programs per multiprocessor, as in `stages.end_states`."""
    return dataclasses.replace(config, dh_block_v=min(config.dh_block_v, 32))


def _state_gradient_stages(call: RecurrenceCall) -> int:
    """Returns the pipeline stages of the reverse scan: as many chunks as fit shared memory, at most the
    configuration's.
    """
    spec, config = call.spec, delta_config(call)
    key_channels = padded(spec.K, MIN_TILE)
    # Shared memory holds the products' operands: q, k and W of all key channels, do and A^T do of the tile.
    bytes_of_chunk = spec.CHUNK * (3 * key_channels + 2 * config.dh_block_v) * call.query.dtype.itemsize
    room = gpu_of(current_device()).shared_memory * 4 // 5
    return max(1, min(config.dh_stages, room // bytes_of_chunk))


def inverse_gradients(
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
        (value, beta, inverse, dv_new, *call.chunk_index.per_chunk),
        [
            Shape(tokens, dv_new.dtype),
            Shape(tokens, value.dtype if spec.HV == spec.H else jnp.float32),
            Shape(tokens[:3], jnp.float32),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={"spec": spec, "BLOCK_V": config.output_block_v},
    )
    return over_groups(dvalue, value), dy, dbeta


def key_gradients(
    call: RecurrenceCall,
    beta: jax.Array,
    cotangent: jax.Array,
    dy: jax.Array,
    states: tuple[jax.Array, jax.Array],
    *,
    gates: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of query, key and gates, and the keys' term of beta's gradient.

    Args:
        call: What the launches of the call share, with the tokens' writes in place of their values.
        beta: [B, T, H].
        cotangent: [B, T, H, V] of the output.
        dy: [B, T, H, V] from `inverse_gradients`.
        states: [B, H, CHUNKS, K, V], those before the chunks, and the gradients of those after them.
        gates: Dtype of the gradient of the gates; None if it is not requested.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, [B, T, H, WIDTH] of the log gates, and [B, T, H].
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.chunk_bwd_dqkwg import chunk_bwd_dqkwg_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    tiles = cdiv(spec.K, config.gradient_block_k)
    numbers, tokens = (batch, tiles, spec.T, spec.H), (batch, spec.T, spec.H, spec.K)
    whole = [call.query.dtype if n == spec.H else jnp.float32 for n in (spec.HQ, spec.HK)]
    gate_shape = (batch,) if gates is None else tokens if spec.WIDTH > 1 else numbers
    dquery, dkey, dgates, dbeta = launch(
        chunk_bwd_dqkwg_kernel,
        (
            call.query,
            call.key,
            call.value,
            call.gates,
            call.decay,
            beta,
            cotangent,
            dy,
            *states,
            gate_signs(call),
            *call.chunk_index.per_chunk,
        ),
        [
            *(Shape(tokens, dtype) for dtype in whole),
            Shape(gate_shape, jnp.float32 if gates is None else gates),
            Shape(numbers, jnp.float32),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H * tiles,
        num_warps=config.gradient_warps,
        num_stages=config.gradient_stages,
        constants={
            "spec": spec,
            "T": 1 if call.decay is None else call.decay.shape[1],
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "GATES": gates is not None,
        },
    )
    if gates is not None and spec.WIDTH == 1:
        dgates = dgates.sum(1)[..., None]
    return over_groups(dquery, call.query), over_groups(dkey, call.key), dgates, dbeta.sum(1)
