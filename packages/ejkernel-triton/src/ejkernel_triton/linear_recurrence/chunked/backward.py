"""Backward pass of a linear recurrence in Triton.

The gradients of the states between chunks come first, in a scan from the last chunk to the first; then those of all
chunks in parallel. There are no atomics, so results are reproducible bit for bit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.chunked.forward import chunk_states, intra_chunk_scores, zero_padding
from ejkernel_triton.linear_recurrence.config import ChunkedConfig
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, make_call
from ejkernel_triton.linear_recurrence.segments.forward import decayed_initial_states, pass_states
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, cast_to_compute_dtype, state_dtype

Gradients = dict[str, jax.Array]
FIELDS_DIFFERENTIATED_BY_VALUE_KERNEL = frozenset({"value", "dt", "skip"})
FIELDS_DIFFERENTIATED_BY_KEY_KERNEL = frozenset({"query", "key", "decay"})

MAX_HEADS_SUMMED_PER_PROGRAM = 8
"""The largest number of heads sharing queries, keys or values whose gradients one program adds up."""


@backward_with_plain_states
def backward(pullback: Pullback, config: ChunkedConfig) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals.
        config: Chunks and tiles of both passes.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, grad_fields, residuals = (
        cast_to_compute_dtype(pullback.record),
        pullback.grad_fields,
        pullback.private_residuals,
    )
    call = make_call(record, config, config.backward_chunk, residuals.gate_cumsum, residuals.scores)
    if call.scores is None:
        call = dataclasses.replace(call, scores=intra_chunk_scores(call))
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    # The scan comes first: the kernels after it read the gradient of the state after each chunk.
    dstates, initial_gradients = _state_gradients(record, call, cotangent, pullback.cotangent[1])
    gradients: Gradients = {"initial_state": initial_gradients, "sequence_state": initial_gradients}
    if grad_fields & FIELDS_DIFFERENTIATED_BY_VALUE_KERNEL:
        outputs = value_gradients(call, cotangent, dstates)
        gradients |= dict(zip(("value", "dt", "skip"), outputs, strict=True))
    if grad_fields & FIELDS_DIFFERENTIATED_BY_KEY_KERNEL:
        states = (
            chunk_states(record, call, residuals.initial_segment_states)
            if residuals.states is None
            else residuals.states
        )
        outputs = key_gradients(call, cotangent, states, dstates, dgates_dtype=gate_gradient_dtype(record, grad_fields))
        gradients |= dict(zip(("query", "key", "decay"), outputs, strict=True))
    if record.cu_seqlens is not None:
        gradients = zero_padding_gradients(call, gradients)
    return {name: sum_to_field_shape(gradients[name], getattr(pullback.record, name)) for name in sorted(grad_fields)}


def _state_gradients(
    record: LinearRecurrence, call: RecurrenceCall, cotangent: jax.Array, final_cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the states after all chunks, [B, H, NUM_CHUNKS, K, V], and of the initial states."""
    is_packed = record.cu_seqlens is not None
    scan_initial_gradients = final_cotangent[None] if is_packed else final_cotangent[:, None]
    if not is_packed and call.spec.NUM_SEQUENCES > 1:
        scan_initial_gradients = decayed_initial_states(
            call, record.query, cotangent, scan_initial_gradients, reverse=True
        )
    dstates, initial_gradients, _ = pass_states(
        call, record.query, cotangent, scan_initial_gradients, dtype=state_dtype(record), reverse=True
    )
    return dstates, initial_gradients[0] if is_packed else initial_gradients[:, 0]


def gate_gradient_dtype(record: LinearRecurrence, grad_fields: frozenset[str]) -> Any:
    """Returns the dtype of gates' gradients: the gates' own if they are not summed further; None if not requested."""
    if record.decay is None or "decay" not in grad_fields:
        return None
    is_per_token_and_channel = record.decay.shape[:2] == record.query.shape[:2] and record.decay.shape[3] > 1
    return record.decay.dtype if is_per_token_and_channel else jnp.float32


def zero_padding_gradients(call: RecurrenceCall, gradients: Gradients) -> Gradients:
    """Sets the gradients of padding tokens of packed sequences to zero, since no chunk contains them."""
    token_fields = FIELDS_DIFFERENTIATED_BY_VALUE_KERNEL | FIELDS_DIFFERENTIATED_BY_KEY_KERNEL | {"beta"}

    def zero_padding_tokens(x: jax.Array) -> jax.Array:
        return zero_padding(x, call.chunk_tables)

    return {name: zero_padding_tokens(x) if name in token_fields and x.ndim > 1 else x for name, x in gradients.items()}


def sum_to_field_shape(gradient: jax.Array, field_array: jax.Array) -> jax.Array:
    """Sums over the axes that the field broadcasts along."""
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field_array.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field_array.dtype)


def value_gradients(
    call: RecurrenceCall, cotangent: jax.Array, dstates: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of value, dt and skip.

    Args:
        call: What the launches of the call share.
        cotangent: [B, T, H, V] of the output.
        dstates: [B, H, NUM_CHUNKS, K, V], gradients of the states after the chunks.

    Returns:
        [B, T, HV, V] in the value's dtype; [B, T, H] float32 for dt, and the skip's gradient per token. The arrays of
        arguments that the record does not have are undefined.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import chunk_bwd_dv_kernel

    spec, config, value, batch = call.spec, call.config, call.value, call.query.shape[0]
    num_tiles, heads_per_program = cdiv(spec.V, config.output_block_v), heads_summed_per_program(spec.H, value.shape[2])
    num_head_groups = spec.H // heads_per_program
    dvalue, ddt, dskip = launch(
        chunk_bwd_dv_kernel,
        (
            call.query,
            call.key,
            value,
            call.gates,
            call.scores,
            call.dt,
            call.skip,
            cotangent,
            dstates,
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        _value_gradient_shapes(call, num_head_groups, num_tiles),
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * num_head_groups * num_tiles,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": value.shape[2],
            "BLOCK_K": config.output_block_k,
            "BLOCK_V": config.output_block_v,
            "HEADS_PER_PROGRAM": heads_per_program,
        },
    )
    return sum_over_head_groups(dvalue, value), _sum_over_tiles(ddt), _sum_over_tiles(dskip)


def _value_gradient_shapes(call: RecurrenceCall, num_head_groups: int, num_tiles: int) -> list[ShapeDtype]:
    """Returns the shapes of the outputs of `chunk_bwd_dv_kernel`: gradients of value, dt and skip.

    If several groups share a value head, their partial sums are float32, and XLA adds them up. A program has a tile of
    value channels, so sums over channels are partial sums, which `_sum_over_tiles` adds up.
    """
    spec, batch, value = call.spec, call.query.shape[0], call.value
    partial_sum_shape = (batch, num_tiles, spec.T, spec.H)
    return [
        ShapeDtype(
            (batch, spec.T, num_head_groups, spec.V), value.dtype if num_head_groups == value.shape[2] else jnp.float32
        ),
        ShapeDtype(partial_sum_shape if spec.HAS_DT else (batch,), jnp.float32),
        ShapeDtype(partial_sum_shape if spec.HAS_SKIP else (batch,), jnp.float32),
    ]


def key_gradients(
    call: RecurrenceCall, cotangent: jax.Array, states: jax.Array, dstates: jax.Array, *, dgates_dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of query, key and gates.

    Args:
        call: What the launches of the call share.
        cotangent: [B, T, H, V] of the output.
        states: [B, H, NUM_CHUNKS, K, V], the states before the chunks.
        dstates: [B, H, NUM_CHUNKS, K, V], gradients of the states after the chunks.
        dgates_dtype: Dtype of the gradients of gates; None if they are not requested.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, and [B, T, H, GATE_CHANNELS] of the log gates, which is
        undefined unless it is requested.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import chunk_bwd_dqkg_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    num_tiles, heads_per_program = cdiv(spec.K, config.gradient_block_k), _key_heads_summed_per_program(spec)
    num_head_groups = spec.H // heads_per_program
    dquery, dkey, dgates = launch(
        chunk_bwd_dqkg_kernel,
        (
            call.query,
            call.key,
            call.value,
            call.gates,
            call.dt,
            cotangent,
            states,
            dstates,
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        _key_gradient_shapes(call, num_head_groups, num_tiles, dgates_dtype),
        batch=batch,
        grid=batch * spec.NUM_CHUNKS * num_head_groups * num_tiles,
        num_warps=config.gradient_warps,
        num_stages=config.gradient_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "HEADS_PER_PROGRAM": heads_per_program,
            "COMPUTE_GATE_GRADIENTS": dgates_dtype is not None,
            "LOAD_VECTORS_AS_TWO_COLUMNS": _loads_vectors_as_two_columns(spec),
        },
    )
    if dgates_dtype is not None and spec.GATE_CHANNELS == 1:
        dgates = _sum_over_tiles(dgates)[..., None]
    return sum_over_head_groups(dquery, call.query), sum_over_head_groups(dkey, call.key), dgates


def _key_gradient_shapes(
    call: RecurrenceCall, num_head_groups: int, num_key_channel_tiles: int, dgates_dtype: Any
) -> list[ShapeDtype]:
    """Returns the shapes of the outputs of `chunk_bwd_dqkg_kernel`: gradients of query, key and gates.

    Gradients of unshared queries and keys are stored by head; shared ones by group, which `sum_over_head_groups` adds
    up.
    """
    spec, batch = call.spec, call.query.shape[0]
    shapes: list[ShapeDtype] = []
    for field_heads in (spec.HQ, spec.HK):
        heads = spec.H if field_heads == spec.H else num_head_groups
        shapes.append(
            ShapeDtype((batch, spec.T, heads, spec.K), call.query.dtype if heads == field_heads else jnp.float32)
        )
    if dgates_dtype is None:
        return [*shapes, ShapeDtype((batch,), jnp.float32)]
    gate_shape = (
        (batch, spec.T, spec.H, spec.K) if spec.GATE_CHANNELS > 1 else (batch, num_key_channel_tiles, spec.T, spec.H)
    )
    return [*shapes, ShapeDtype(gate_shape, dgates_dtype)]


def _loads_vectors_as_two_columns(spec: RecurrenceSpec) -> bool:
    """Returns whether gates and dt are loaded by `tile.load_vector_as_two_columns`."""
    return spec.HAS_DT and spec.CHUNKS_PER_SEGMENT == 0


def heads_summed_per_program(heads: int, field_heads: int) -> int:
    """Returns how many of the heads that share a field's head one program adds up: a power of two that divides them."""
    heads_per_field_head = heads // field_heads
    return min(MAX_HEADS_SUMMED_PER_PROGRAM, heads_per_field_head & -heads_per_field_head)


def _key_heads_summed_per_program(spec: RecurrenceSpec) -> int:
    """Returns the heads whose gradients of queries and keys one program adds up."""
    head_counts = [heads_summed_per_program(spec.H, n) for n in (spec.HQ, spec.HK) if n < spec.H]
    return min(head_counts, default=1)


def sum_over_head_groups(partial_sums: jax.Array, field_array: jax.Array) -> jax.Array:
    """Adds up the gradient of a field from partial sums of groups of heads, [B, T, groups, d]."""
    if partial_sums.shape[2] == field_array.shape[2]:
        return partial_sums.astype(field_array.dtype)
    rows, tokens, heads, width = field_array.shape
    return partial_sums.reshape(rows, tokens, heads, -1, width).sum(3).astype(field_array.dtype)


def _sum_over_tiles(partial_sums: jax.Array) -> jax.Array:
    """Sums [B, tiles, T, H] over tiles."""
    return partial_sums if partial_sums.ndim == 1 else partial_sums.sum(1)
