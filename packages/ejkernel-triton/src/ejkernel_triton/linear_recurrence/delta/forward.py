"""Forward pass of the delta rule in Triton: its WY form in all chunks, the states between them, then their outputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel
from ejkernel.families.linear_recurrence.plain_states import with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence.chunked.forward import (
    chunk_outputs,
    fused_chunk_scan,
    initial_states,
    zero_padding,
)
from ejkernel_triton.linear_recurrence.config import MIN_TILE, WARPS
from ejkernel_triton.linear_recurrence.delta.config import DeltaPasses
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall, make_call
from ejkernel_triton.linear_recurrence.segments.forward import (
    delta_initial_states,
    effective_lengths,
    end_states,
    pass_states,
)
from ejkernel_triton.linear_recurrence.segments.plan import split_segments
from ejkernel_triton.linear_recurrence.spec import state_dtype
from ejkernel_triton.sizes import ceil_div

LARGE_DECAY_CHANNELS = 32
"""Key channels at once where gates are too strong for one product of a chunk's pairs: halvings need the registers."""


class WYForm(NamedTuple):
    """The WY form of the delta rule inside of chunks, which needs no state.

    Attributes:
        u: [B, T, H, V], U: what tokens write if the state before their chunk is 0.
        w: [B, T, H, K], W: with S the state before its chunk, a token writes U - W S.
        inverse: [B, H, CHUNKS * CHUNK, CHUNK], the inverse of I plus the strictly lower matrix of keys that see keys;
            unused unless it is kept.
    """

    u: jax.Array
    w: jax.Array
    inverse: jax.Array


class SegmentStates(NamedTuple):
    """States at the start of sequences or segments, and what a segment does to the state that it begins with.

    Attributes:
        starts: [B, SEQUENCES, H, K, V]; None is zeros.
        ends: [B, SEGMENTS, H, K, V + K] float32, N and M: final states of scans from zeros, and transitions. The state
            after a segment that begins with S is N + M S. None where rows are whole.
        used: [B, SEGMENTS, H], 0 where no state passes through a segment, and so no gradient. None if it is not known.
    """

    starts: jax.Array | None
    ends: jax.Array | None = None
    used: jax.Array | None = None


class DeltaResiduals(NamedTuple):
    """What the backward pass need not make again; None where it has other chunks, or memory is to be spared.

    Attributes:
        wy: The WY form.
        arrays: Of the call for state passing: `gates` and, with gates per key channel, `query`, `key` and `scores`.
        segments: States at the start of sequences and segments.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        value: [B, T, H, V], what tokens write: U - W S.
    """

    wy: WYForm | None = None
    arrays: dict[str, jax.Array | None] | None = None
    segments: SegmentStates | None = None
    states: jax.Array | None = None
    value: jax.Array | None = None


@with_plain_states
def forward(
    record: LinearRecurrence, config: DeltaPasses
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaResiduals]:
    """Returns output and final states of a record with beta, and the private residuals for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals; what the backward pass is
        spared.
    """
    kept = config.keep_states and config.backward_chunk == config.chunk
    wy, call = wy_form(record, config, config.chunk, keep=kept)
    # What the backward pass needs of a scan it would have to make again, so with gradients two kernels store it: 4.67
    # ms instead of 4.75 with gates per key channel (docs/lab/linear_recurrence_gpu.md).
    stored = kept and is_differentiated()
    begin, states, value = segment_states(record, call, wy, keep=stored), None, None
    fuse = config.fused and not stored
    if fuse:
        fused = dataclasses.replace(call, value=wy.u)
        output, final = fused_chunk_scan(fused, begin.starts, w=wy.w)
    else:
        states, final, value = chunk_states(record, call, wy, begin)
        # What tokens write takes the place of their values: after that, outputs are those of a plain recurrence.
        output = chunk_outputs(dataclasses.replace(call, value=value), states)
    pocket = DeltaResiduals()
    if kept:
        pocket = DeltaResiduals(wy, arrays_of(call), begin if stored else None, states, value)
    if record.cu_seqlens is None:
        return (output, final[:, -1]), (), pocket
    # No chunk has the padding tokens, so no program of two kernels writes their outputs.
    return (output if fuse else zero_padding(output, call.chunk_index), final[0]), (), pocket


def with_arrays(call: RecurrenceCall, arrays: Mapping[str, jax.Array | None]) -> RecurrenceCall:
    """Returns a call with arrays that another had; with decayed queries and keys, one whose kernels are told so."""
    if "query" in arrays:
        spec = dataclasses.replace(call.spec, DECAYED=True, HQ=call.spec.H, HK=call.spec.H)
        call = dataclasses.replace(call, spec=spec)
    return dataclasses.replace(call, **arrays)


def arrays_of(call: RecurrenceCall) -> dict[str, jax.Array | None]:
    """Returns the arrays of a call that the WY form's kernels wrote, for `with_arrays`."""
    names = ("gates", "query", "key", "scores") if call.spec.DECAYED else ("gates",)
    return {name: getattr(call, name) for name in names}


def wy_form(record: LinearRecurrence, config: DeltaPasses, chunk: int, *, keep: bool) -> tuple[WYForm, RecurrenceCall]:
    """Computes the WY form, and the call for state passing and outputs.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.
        chunk: Tokens of a chunk, which of the two lengths.
        keep: Whether the inverse is kept for the backward pass.
    """
    assert record.beta is not None  # `Requires` saw to it
    if record.decay is not None and by_channel(record):
        call = make_call(record, config, tokens_of_chunk(record, chunk), cumulative=False)
        return wy_channel_gates(call, record.decay, record.beta, keep=keep)
    call = make_call(record, config, chunk)
    return wy_fast(call, record.beta, keep=keep), call


def tokens_of_chunk(record: LinearRecurrence, chunk: int) -> int:
    """Returns tokens of a chunk of a record with beta, from those of its configuration.

    With gates per key channel and chunks of 16 tokens Triton 3.6 computes columns of `wy_large_decay_kernel` wrongly
    on NVIDIA's chips (see `ahead.mixed_lanes`). With 32 tokens no such instruction is in the code.
    """
    return max(2 * MIN_TILE, chunk) if by_channel(record) and not interpreting() else chunk


def segment_states(record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, *, keep: bool) -> SegmentStates:
    """Computes the states at the start of sequences or segments.

    Each segment of a row is scanned before, at the same time as the others: from zeros, which gives N, and with nothing
    to write from the identity, which gives M. The state S after a segment is N + M S, with S the one before.

    Args:
        record: The canonical arguments.
        call: What the launches of the call share.
        wy: The WY form.
        keep: Whether the backward pass reads the transitions, including that of the last segment.
    """
    initial = initial_states(record)
    if record.cu_seqlens is not None or call.spec.SEQUENCES < 2:
        return SegmentStates(initial)
    split = split_segments(call.spec, reverse=False, zero_start=initial is None, every=keep)
    lengths = effective_lengths(call, wy.w, split)
    ends, used = end_states(call, call.key, wy.u, split, w=wy.w, lengths=lengths)
    used = None if lengths is None else used
    first = None if initial is None else initial[:, 0]
    starts = delta_initial_states(call.spec, split, ends, ends, first, used)
    return SegmentStates(starts, ends, used) if keep else SegmentStates(starts)


def chunk_states(
    record: LinearRecurrence, call: RecurrenceCall, wy: WYForm, begin: SegmentStates
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States before the chunks, final ones, and what tokens write."""
    return pass_states(
        call,
        call.key,
        wy.u,
        begin.starts,
        dtype=state_dtype(record),
        w=wy.w,
    )


def wy_fast(call: RecurrenceCall, beta: jax.Array, *, keep: bool) -> WYForm:
    """Computes the WY form.

    Args:
        call: What the launches of the call share.
        beta: [B, T, H].
        keep: Whether the inverse is kept for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_fast import wy_fast_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    inverse = (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK) if keep else (batch,)
    made = launch(
        wy_fast_kernel,
        (call.key, call.value, call.gates, beta, *call.chunk_index.per_chunk),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.value.dtype),
            Shape((batch, spec.T, spec.H, spec.K), call.key.dtype),
            Shape(inverse, call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=WARPS,
        num_stages=1,
        constants={
            "spec": spec,
            "BLOCK_K": config.wy_block_k,
            "BLOCK_V": config.wy_block_v,
            "KEEP": keep,
        },
    )
    return WYForm(*made)


def wy_channel_gates(
    call: RecurrenceCall, decay: jax.Array, beta: jax.Array, *, keep: bool
) -> tuple[WYForm, RecurrenceCall]:
    """Returns `wy_fast` with gates per key channel, and the call whose queries and keys have their decay.

    Args:
        call: What the launches of the call share; its cumulative gates are not read.
        decay: [B|1, T|1, H, K], log gates.
        beta: [B, T, H].
        keep: Whether the inverse is kept for the backward pass.

    Returns:
        The WY form, and the call for state passing and outputs: queries and keys with their decay, both
        [B, T, H, K], the factors of chunks in place of gates, and scores.
    """
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_channel_gates import wy_channel_gates_kernel
    from ejkernel_triton.linear_recurrence.delta.kernels.wy_large_decay import wy_large_decay_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    tokens, pairs = (batch, spec.T, spec.H), (batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK)
    chunks, dtype = (batch, spec.H, spec.CHUNKS), call.query.dtype
    arrays = (call.query, call.key, call.value, decay, beta, *call.chunk_index.per_chunk)
    options: dict[str, Any] = {"batch": batch, "num_warps": WARPS, "num_stages": 1}
    constants = {"spec": spec, "T": decay.shape[1], "BLOCK_V": config.wy_block_v, "KEEP": keep}
    *made, exponents = launch(
        wy_channel_gates_kernel,
        arrays,
        [
            Shape((*tokens, spec.V), call.value.dtype),
            Shape((*tokens, spec.K), call.key.dtype),
            Shape(pairs if keep else (batch,), call.key.dtype),
            Shape(pairs, dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((*tokens, spec.K), dtype),
            Shape((*chunks, 3, spec.K), jnp.float32),
            Shape(chunks, jnp.float32),
        ],
        **options,
        grid=batch * spec.CHUNKS * spec.H,
        constants={**constants, "BLOCK_K": config.wy_block_k},
    )
    # Chunks with strong gates once more, in place. The array after them is cumulative gates, which no other kernel
    # reads.
    first, group = len(arrays) + 1, max(1, min(16, spec.CHUNKS * spec.H // 128))
    u, w, inverse, scores, query, key, factors, _ = launch(
        wy_large_decay_kernel,
        (*arrays, exponents, *made),
        [*range(first, first + len(made)), Shape((*pairs[:3], spec.K), jnp.float32)],
        **options,
        grid=batch * spec.H * ceil_div(spec.CHUNKS, group),
        constants={**constants, "BLOCK_K": min(config.wy_block_k, LARGE_DECAY_CHANNELS), "GROUP": group},
    )
    arrays = {"query": query, "key": key, "gates": factors, "scores": scores}
    return WYForm(u, w, inverse), with_arrays(call, arrays)


def delta_config(call: RecurrenceCall) -> DeltaPasses:
    """Returns the configuration of a call of the delta rule."""
    assert isinstance(call.config, DeltaPasses)  # the type that the implementation declares
    return call.config
