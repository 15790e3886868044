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
from ejkernel.families.linear_recurrence.plain_states import with_plain_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.chunked.forward import chunk_states, intra_chunk_scores, zero_padding
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, make_call
from ejkernel_triton.linear_recurrence.segments.forward import decayed_initial_states, pass_states
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, canonical, state_dtype

Gradients = dict[str, jax.Array]
OF_VALUES = frozenset({"value", "dt", "skip"})
OF_KEYS = frozenset({"query", "key", "decay"})

MAX_SHARED_HEADS = 8
"""The largest number of heads sharing queries, keys or values whose gradients one program adds up."""


@with_plain_state_gradients
def backward(pullback: Pullback, config: ChunkPasses) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals.
        config: Chunks and tiles of both passes.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, grad_fields, private = canonical(pullback.record), pullback.grad_fields, pullback.private_residuals
    call = make_call(record, config, config.backward_chunk, private.gates, private.scores)
    if call.scores is None:
        call = dataclasses.replace(call, scores=intra_chunk_scores(call))
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    # The scan comes first: the kernels after it read the gradient of the state after each chunk.
    dstates, first = _state_gradients(record, call, cotangent, pullback.cotangent[1])
    gradients: Gradients = {"initial_state": first, "sequence_state": first}
    if grad_fields & OF_VALUES:
        made = value_gradients(call, cotangent, dstates)
        gradients |= dict(zip(("value", "dt", "skip"), made, strict=True))
    if grad_fields & OF_KEYS:
        states = chunk_states(record, call, private.starts) if private.states is None else private.states
        made = key_gradients(call, cotangent, states, dstates, gates=gate_dtype(record, grad_fields))
        gradients |= dict(zip(("query", "key", "decay"), made, strict=True))
    if record.cu_seqlens is not None:
        gradients = zero_padding_gradients(call, gradients)
    return {name: sum_to_shape(gradients[name], getattr(pullback.record, name)) for name in sorted(grad_fields)}


def _state_gradients(
    record: LinearRecurrence, call: RecurrenceCall, cotangent: jax.Array, final: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the states after all chunks, [B, H, CHUNKS, K, V], and of the initial states."""
    packed = record.cu_seqlens is not None
    initial = final[None] if packed else final[:, None]
    if not packed and call.spec.SEQUENCES > 1:
        initial = decayed_initial_states(call, record.query, cotangent, initial, reverse=True)
    dstates, first, _ = pass_states(call, record.query, cotangent, initial, dtype=state_dtype(record), reverse=True)
    return dstates, first[0] if packed else first[:, 0]


def gate_dtype(record: LinearRecurrence, grad_fields: frozenset[str]) -> Any:
    """Returns the dtype of gates' gradients: the gates' own if they are not summed further; None if not requested."""
    if record.decay is None or "decay" not in grad_fields:
        return None
    whole = record.decay.shape[:2] == record.query.shape[:2] and record.decay.shape[3] > 1
    return record.decay.dtype if whole else jnp.float32


def zero_padding_gradients(call: RecurrenceCall, gradients: Gradients) -> Gradients:
    """Sets the gradients of padding tokens of packed sequences to zero, since no chunk contains them."""
    per_token = OF_VALUES | OF_KEYS | {"beta"}

    def masked(x: jax.Array) -> jax.Array:
        return zero_padding(x, call.chunk_index)

    return {name: masked(x) if name in per_token and x.ndim > 1 else x for name, x in gradients.items()}


def sum_to_shape(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Sums over the axes that the field broadcasts along."""
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field.dtype)


def value_gradients(
    call: RecurrenceCall, cotangent: jax.Array, dstates: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of value, dt and skip.

    Args:
        call: What the launches of the call share.
        cotangent: [B, T, H, V] of the output.
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.

    Returns:
        [B, T, HV, V] in the value's dtype; [B, T, H] float32 for dt, and the skip's gradient per token. The arrays of
        arguments that the record does not have are undefined.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import chunk_bwd_dv_kernel

    spec, config, value, batch = call.spec, call.config, call.value, call.query.shape[0]
    tiles, shared = cdiv(spec.V, config.output_block_v), shared_heads(spec.H, value.shape[2])
    # If several groups share a value head, their partial sums are float32, and XLA adds them up.
    groups = spec.H // shared
    # A program has a tile of value channels, so sums over channels are partial sums, which are added below.
    numbers = (batch, tiles, spec.T, spec.H)
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
            *call.chunk_index.per_chunk,
        ),
        [
            Shape((batch, spec.T, groups, spec.V), value.dtype if groups == value.shape[2] else jnp.float32),
            Shape(numbers if spec.DT else (batch,), jnp.float32),
            Shape(numbers if spec.SKIP else (batch,), jnp.float32),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * groups * tiles,
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": value.shape[2],
            "BLOCK_K": config.output_block_k,
            "BLOCK_V": config.output_block_v,
            "SHARED": shared,
        },
    )
    return over_groups(dvalue, value), _over_tiles(ddt), _over_tiles(dskip)


def key_gradients(
    call: RecurrenceCall, cotangent: jax.Array, states: jax.Array, dstates: jax.Array, *, gates: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of query, key and gates.

    Args:
        call: What the launches of the call share.
        cotangent: [B, T, H, V] of the output.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.
        gates: Dtype of the gradients of gates; None if they are not requested.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, and [B, T, H, WIDTH] of the log gates, which is undefined
        unless it is requested.
    """
    from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import chunk_bwd_dqkg_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    tiles, shared = cdiv(spec.K, config.gradient_block_k), _sum_of_shared(spec)
    groups = spec.H // shared
    # Gradients of unshared queries and keys are stored by head; shared ones by group, which `over_groups` adds up.
    heads = [spec.H if n == spec.H else groups for n in (spec.HQ, spec.HK)]
    exact = [query_heads == n for query_heads, n in zip(heads, (spec.HQ, spec.HK), strict=True)]
    gate_shape = (batch, spec.T, spec.H, spec.K) if spec.WIDTH > 1 else (batch, tiles, spec.T, spec.H)
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
            *call.chunk_index.per_chunk,
        ),
        [
            *(
                Shape((batch, spec.T, n, spec.K), call.query.dtype if whole else jnp.float32)
                for n, whole in zip(heads, exact, strict=True)
            ),
            Shape(gate_shape if gates is not None else (batch,), jnp.float32 if gates is None else gates),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * groups * tiles,
        num_warps=config.gradient_warps,
        num_stages=config.gradient_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "SHARED": shared,
            "GATES": gates is not None,
            "ONCE": _loads_once(spec),
        },
    )
    if gates is not None and spec.WIDTH == 1:
        dgates = _over_tiles(dgates)[..., None]
    return over_groups(dquery, call.query), over_groups(dkey, call.key), dgates


def _loads_once(spec: RecurrenceSpec) -> bool:
    """Returns whether gates and dt are loaded by `tile.load_once`."""
    return spec.DT and spec.PER_SEQUENCE == 0


def shared_heads(heads: int, fields: int) -> int:
    """Returns how many of the heads that share a field's head one program adds up: a power of two that divides them."""
    group = heads // fields
    return min(MAX_SHARED_HEADS, group & -group)


def _sum_of_shared(spec: RecurrenceSpec) -> int:
    """Returns the heads whose gradients of queries and keys one program adds up."""
    found = [shared_heads(spec.H, n) for n in (spec.HQ, spec.HK) if n < spec.H]
    return min(found, default=1)


def over_groups(parts: jax.Array, field: jax.Array) -> jax.Array:
    """Adds up the gradient of a field from partial sums of groups of heads, [B, T, groups, d]."""
    if parts.shape[2] == field.shape[2]:
        return parts.astype(field.dtype)
    rows, tokens, heads, width = field.shape
    return parts.reshape(rows, tokens, heads, -1, width).sum(3).astype(field.dtype)


def _over_tiles(parts: jax.Array) -> jax.Array:
    """Sums [B, tiles, T, H] over tiles."""
    return parts if parts.ndim == 1 else parts.sum(1)
