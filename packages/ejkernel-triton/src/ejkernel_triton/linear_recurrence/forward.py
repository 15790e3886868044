"""Forward pass of a linear recurrence in Triton: the states between chunks, then all chunks at the same time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.planning import packing
from ejkernel_triton.linear_recurrence import stages
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, Spans, make_spans, make_spec, state_dtype


class Pocket(NamedTuple):
    """What the backward pass need not make again.

    Attributes:
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, cumulative gates; None without gates.
        states: [B, H, CHUNKS, K, V], those before the chunks; None if they are to be made again.
    """

    gates: jax.Array | None
    states: jax.Array | None


def forward(record: LinearRecurrence, config: ChunkPasses) -> tuple[tuple[jax.Array, jax.Array], tuple[()], Pocket]:
    """Output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    spec = make_spec(record, config.chunk, config.splits)
    spans = make_spans(record, spec)
    gates = stages.cumulative_gates(record, spec, spans)
    states, final = boundaries(record, spec, config, gates, spans)
    output = stages.make_outputs(
        spec,
        config,
        record.query,
        record.key,
        record.value,
        gates,
        states,
        spans,
        dt=record.dt,
        skip=record.skip,
    )
    if record.cu_seqlens is not None:
        owned = packing.packed_ids(record.cu_seqlens, spec.T)[0][0] >= 0
        output = jnp.where(owned[None, :, None, None], output, 0)
    kept = states if config.keep_states else None
    return (output, final), (), Pocket(gates, kept)


def boundaries(
    record: LinearRecurrence, spec: RecurrenceSpec, config: ChunkPasses, gates: jax.Array | None, spans: Spans
) -> tuple[jax.Array, jax.Array]:
    """The states before all chunks, [B, H, CHUNKS, K, V], and the final ones, as the record has them."""
    initial = initial_states(record)
    if record.cu_seqlens is None and spec.SEQUENCES > 1:
        initial = segment_starts(spec, config, record.key, record.value, gates, spans, initial, dt=record.dt)
    states, final, _ = stages.pass_states(
        spec, config, record.key, record.value, gates, spans, initial, state_dtype(record), dt=record.dt
    )
    return states, final[0] if record.cu_seqlens is not None else final[:, -1]


def initial_states(record: LinearRecurrence) -> jax.Array | None:
    """[B, 1, H, K, V], or [1, N, H, K, V] of packed sequences; None is zeros."""
    if record.cu_seqlens is not None:
        return None if record.sequence_state is None else record.sequence_state[None]
    return None if record.initial_state is None else record.initial_state[:, None]


def segment_starts(
    spec: RecurrenceSpec,
    config: ChunkPasses,
    left: jax.Array,
    right: jax.Array,
    gates: jax.Array | None,
    spans: Spans,
    initial: jax.Array | None,
    *,
    dt: jax.Array | None = None,
    reverse: bool = False,
) -> jax.Array:
    """Where the walks through the segments of a row begin, [B, SEQUENCES, H, K, V] float32.

    Each segment is walked from zeros first, at the same time as the others and writing nothing but where it ends. With
    the decay of whole segments, a few additions then give where each begins.

    Args:
        initial: [B, 1, H, K, V], where the first walk begins; None is zeros.
    """
    _, ends, _ = stages.pass_states(
        spec, config, left, right, gates, spans, None, jnp.float32, dt=dt, reverse=reverse, write=False
    )
    state = jnp.zeros_like(ends[:, 0]) if initial is None else initial[:, 0].astype(jnp.float32)
    starts = [state] * spec.SEQUENCES
    order = range(spec.SEQUENCES)[::-1] if reverse else range(spec.SEQUENCES)
    decays = None if gates is None else _segment_decays(spec, gates)
    for n in order:
        starts[n] = state
        state = ends[:, n] + (state if decays is None else state * decays[:, n])
    return jnp.stack(starts, axis=1)


def _segment_decays(spec: RecurrenceSpec, gates: jax.Array) -> jax.Array:
    """The factor on a state that passes through a segment, [B|1, SEQUENCES, H, K|1, 1]."""
    last = gates[:, :, spec.CHUNK - 1 :: spec.CHUNK]
    missing = spec.SEQUENCES * spec.PER_SEQUENCE - spec.CHUNKS
    last = jnp.pad(last, ((0, 0), (0, 0), (0, missing), (0, 0)))
    sums = last.reshape(*last.shape[:2], spec.SEQUENCES, spec.PER_SEQUENCE, spec.WIDTH).sum(3)
    return jnp.exp2(sums).swapaxes(1, 2)[..., None]
