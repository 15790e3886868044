"""Backward pass of a linear recurrence in Triton.

The gradients of the states between chunks come first, in a walk from the last chunk to the first; then those of all
chunks at the same time. Without atomic additions: the same bits every time.
"""

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.pullback import Pullback
from ejkernel.planning import packing
from ejkernel_triton.linear_recurrence import stages
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.forward import Pocket, boundaries, segment_starts
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, Spans, make_spans, make_spec, state_dtype

Gradients = dict[str, jax.Array]
OF_VALUES = frozenset({"value", "dt", "skip"})
OF_KEYS = frozenset({"query", "key", "decay"})
WEAKEST = -40.0
"""Log gates below are the same to the kernels, and have no gradient."""


def backward(pullback: Pullback, config: ChunkPasses) -> Gradients:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the wanted names, and the pocket of the forward pass.
        config: Chunks and tiles of both passes.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, wanted = pullback.record, pullback.wanted
    spec = make_spec(record, config.chunk, config.splits)
    spans = make_spans(record, spec)
    pocket = _pocket(pullback, spec, config, spans)
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    dstates, first = _state_gradients(pullback, spec, config, pocket.gates, spans)
    gradients: Gradients = {"initial_state": first, "sequence_state": first}
    if wanted & OF_VALUES:
        gradients |= _of_values(record, spec, config, cotangent, pocket, dstates, spans)
    if wanted & OF_KEYS:
        gradients |= _of_keys(record, spec, config, cotangent, pocket, dstates, spans, "decay" in wanted)
    if record.cu_seqlens is not None:
        gradients = _owned(record, gradients)
    return {name: _reduced(gradients[name], getattr(record, name)) for name in sorted(wanted)}


def _pocket(pullback: Pullback, spec: RecurrenceSpec, config: ChunkPasses, spans: Spans) -> Pocket:
    """The forward pass's, with the states made again if it kept none."""
    pocket = pullback.pocket
    if pocket.states is None and pullback.wanted & OF_KEYS:
        return Pocket(pocket.gates, boundaries(pullback.record, spec, config, pocket.gates, spans)[0])
    return pocket


def _state_gradients(
    pullback: Pullback, spec: RecurrenceSpec, config: ChunkPasses, gates: jax.Array | None, spans: Spans
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the states after all chunks, [B, H, CHUNKS, K, V], and of those before the first ones."""
    record = pullback.record
    cotangent, final = pullback.cotangent
    cotangent = cotangent.astype(record.query.dtype)
    packed = record.cu_seqlens is not None
    initial = final[None] if packed else final[:, None]
    if not packed and spec.SEQUENCES > 1:
        initial = segment_starts(spec, config, record.query, cotangent, gates, spans, initial, reverse=True)
    dstates, first, _ = stages.pass_states(
        spec, config, record.query, cotangent, gates, spans, initial, state_dtype(record), reverse=True
    )
    return dstates, first[0] if packed else first[:, 0]


def _of_values(
    record: LinearRecurrence,
    spec: RecurrenceSpec,
    config: ChunkPasses,
    cotangent: jax.Array,
    pocket: Pocket,
    dstates: jax.Array,
    spans: Spans,
) -> Gradients:
    dvalue, ddt, dskip = stages.value_gradients(
        spec,
        config,
        record.query,
        record.key,
        record.value,
        cotangent,
        pocket.gates,
        dstates,
        spans,
        dt=record.dt,
        skip=record.skip,
    )
    return {"value": dvalue, "dt": ddt, "skip": dskip}


def _of_keys(
    record: LinearRecurrence,
    spec: RecurrenceSpec,
    config: ChunkPasses,
    cotangent: jax.Array,
    pocket: Pocket,
    dstates: jax.Array,
    spans: Spans,
    wants_gates: bool,
) -> Gradients:
    assert pocket.states is not None  # `_pocket` made them
    dquery, dkey, ddecay = stages.key_gradients(
        spec,
        config,
        record.query,
        record.key,
        record.value,
        cotangent,
        pocket.gates,
        pocket.states,
        dstates,
        spans,
        dt=record.dt,
        wants_gates=wants_gates,
    )
    if wants_gates and record.decay is not None:
        ddecay = jnp.where(record.decay < WEAKEST, 0, ddecay)
    return {"query": dquery, "key": dkey, "decay": ddecay}


def _owned(record: LinearRecurrence, gradients: Gradients) -> Gradients:
    """Gradients with zeros for tokens of no packed sequence, which no chunk has."""
    assert record.cu_seqlens is not None
    tokens = record.query.shape[1]
    owned = packing.packed_ids(record.cu_seqlens, tokens)[0][0] >= 0
    per_token = OF_VALUES | OF_KEYS

    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(owned.reshape(1, tokens, *(1,) * (x.ndim - 2)), x, 0)

    return {name: masked(x) if name in per_token and x.ndim > 1 else x for name, x in gradients.items()}


def _reduced(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Summed over the axes along which the field is the same."""
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field.dtype)
