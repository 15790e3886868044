"""Backward pass of a linear recurrence in Triton.

The gradients of the states between chunks come first, in a walk from the last chunk to the first; then those of all
chunks at the same time. Without atomic additions: the same bits every time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import with_plain_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_triton.linear_recurrence import segments, stages
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.forward import boundaries, zero_outside
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, canonical, state_dtype

Gradients = dict[str, jax.Array]
OF_VALUES = frozenset({"value", "dt", "skip"})
OF_KEYS = frozenset({"query", "key", "decay"})


@with_plain_state_gradients
def backward(pullback: Pullback, config: ChunkPasses) -> Gradients:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the wanted names, and the pocket of the forward pass.
        config: Chunks and tiles of both passes.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, wanted, pocket = canonical(pullback.record), pullback.wanted, pullback.pocket
    call = stages.make_call(record, config, config.backward_chunk, pocket.gates, pocket.scores)
    if call.scores is None:
        call = dataclasses.replace(call, scores=stages.channel_scores(call))
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    # The walk comes first: the kernels below read the gradient of the state behind each chunk.
    dstates, first = _state_gradients(record, call, cotangent, pullback.cotangent[1])
    gradients: Gradients = {"initial_state": first, "sequence_state": first}
    if wanted & OF_VALUES:
        made = stages.value_gradients(call, cotangent, dstates)
        gradients |= dict(zip(("value", "dt", "skip"), made, strict=True))
    if wanted & OF_KEYS:
        states = boundaries(record, call, pocket.starts) if pocket.states is None else pocket.states
        made = stages.key_gradients(call, cotangent, states, dstates, gates=gate_dtype(record, wanted))
        gradients |= dict(zip(("query", "key", "decay"), made, strict=True))
    if record.cu_seqlens is not None:
        gradients = zero_outside_sequences(call, gradients)
    return {name: reduced(gradients[name], getattr(pullback.record, name)) for name in sorted(wanted)}


def _state_gradients(
    record: LinearRecurrence, call: RecurrenceCall, cotangent: jax.Array, final: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the states after all chunks, [B, H, CHUNKS, K, V], and of those before the first ones."""
    packed = record.cu_seqlens is not None
    initial = final[None] if packed else final[:, None]
    if not packed and call.spec.SEQUENCES > 1:
        initial = segments.decayed_starts(call, record.query, cotangent, initial, reverse=True)
    dstates, first, _ = stages.pass_states(
        call, record.query, cotangent, initial, dtype=state_dtype(record), reverse=True
    )
    return dstates, first[0] if packed else first[:, 0]


def gate_dtype(record: LinearRecurrence, wanted: frozenset[str]) -> Any:
    """In which the gradients of gates are written: the gates' own where they are not summed; None if not wanted."""
    if record.decay is None or "decay" not in wanted:
        return None
    whole = record.decay.shape[:2] == record.query.shape[:2] and record.decay.shape[3] > 1
    return record.decay.dtype if whole else jnp.float32


def zero_outside_sequences(call: RecurrenceCall, gradients: Gradients) -> Gradients:
    """Gradients with zeros for tokens of no packed sequence, which no chunk has."""
    per_token = OF_VALUES | OF_KEYS | {"beta"}

    def masked(x: jax.Array) -> jax.Array:
        return zero_outside(x, call.spans)

    return {name: masked(x) if name in per_token and x.ndim > 1 else x for name, x in gradients.items()}


def reduced(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Summed over the axes along which the field is the same."""
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field.dtype)
