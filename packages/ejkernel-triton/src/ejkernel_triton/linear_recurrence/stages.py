"""The stages of both passes, each one launch: gates, states, outputs, gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkPasses
from ejkernel_triton.linear_recurrence.shared_memory import state_stages
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, RecurrenceSpec, Spans, make_spans, make_spec
from ejkernel_triton.sizes import padded

GATE_COLUMNS = 64
"""Gates of a token that a program sums up."""

MAX_SHARED_HEADS = 8
"""Heads that share queries, keys or values and whose gradients one program adds up."""


def make_call(
    record: LinearRecurrence,
    config: ChunkPasses,
    chunk: int,
    gates: jax.Array | None = None,
    scores: jax.Array | None = None,
    *,
    cumulative: bool = True,
) -> RecurrenceCall:
    """The call of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles.
        chunk: Tokens a chunk, which of the two lengths.
        gates: Cumulative gates, where the forward pass kept them.
        scores: Scores of pairs of tokens with gates of channels, where the forward pass kept them.
        cumulative: Whether cumulative gates are made where they were not kept.
    """
    spec = make_spec(record, chunk, config.splits)
    spans = make_spans(record, spec)
    if cumulative and gates is None:
        gates = cumulative_gates(record.decay, spec, spans)
    return RecurrenceCall(
        spec=spec,
        config=config,
        query=record.query,
        key=record.key,
        value=record.value,
        gates=gates,
        scores=scores,
        dt=record.dt,
        skip=record.skip,
        spans=spans,
    )


def cumulative_gates(decay: jax.Array | None, spec: RecurrenceSpec, spans: Spans) -> jax.Array | None:
    """Sums of log gates from each chunk's first token on, in powers of two.

    Args:
        decay: [B|1, T|1, H, WIDTH], or None.
        spec: Constants.
        spans: Where the chunks of packed sequences lie.

    Returns:
        [B|1, H, CHUNKS * CHUNK, WIDTH] float32; rows behind a chunk's last token repeat its sum.
        [B|1, H], the log gates themselves, where they are constant. None without gates.
    """
    from ejkernel_triton.linear_recurrence.states_kernels import gates_kernel

    if decay is None:
        return None
    if spec.CONSTANT:
        return decay[:, 0, :, 0]
    rows, columns = decay.shape[0], spec.H * spec.WIDTH
    block = min(GATE_COLUMNS, padded(columns, MIN_TILE))
    (cumulative,) = launch(
        gates_kernel,
        (decay, *spans.of_chunks),
        [Shape((rows, spec.H, spec.CHUNKS * spec.CHUNK, spec.WIDTH), jnp.float32)],
        batch=rows,
        grid=rows * spec.CHUNKS * -(-columns // block),
        num_warps=4,
        num_stages=1,
        constants={"spec": spec, "T": decay.shape[1], "BLOCK": block},
    )
    return cumulative


def pass_states(
    call: RecurrenceCall,
    left: jax.Array,
    right: jax.Array,
    initial: jax.Array | None,
    *,
    dtype: Any,
    correction: jax.Array | None = None,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states between chunks, or their gradients.

    Forwards, S = exp2(G_T) S + sum_j (exp2(G_T - G_j) dt_j left_j) right_j^T from chunk to chunk. In reverse,
    S = exp2(G_T) S + scale sum_i (exp2(G_i) left_i) right_i^T, without dt. The state is stored as a program arrives at
    a chunk: forwards the state before it, in reverse the gradient of the state after it.

    Args:
        call: What the stages share.
        left: [B, T, heads, K] keys, or queries.
        right: [B, T, heads, V] values, or the output's cotangent.
        initial: [B, SEQUENCES, H, K, V], where each walk begins; None is zeros.
        dtype: Dtype of the states that are stored.
        correction: w, [B, T, H, K]: right_j - S^T w_j replaces right_j, with S the state before the chunk, and is
            stored too. A program then holds all key channels, since S^T w_j is a sum over them.
        reverse: Whether to walk from the last chunk to the first.

    Returns:
        States [B, H, CHUNKS, K, V], those at the end of the walks [B, SEQUENCES, H, K, V] float32, and the corrected
        right [B, T, H, V], of no use without correction.
    """
    spec, batch = call.spec, left.shape[0]
    outputs = [
        Shape((batch, spec.H, spec.CHUNKS, spec.K, spec.V), dtype),
        Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
        Shape((batch, spec.T, spec.H, spec.V) if correction is not None else (batch,), right.dtype),
    ]
    return walk_states(call, (left, right, initial, correction, None), outputs, {"REVERSE": reverse, "WRITE": True})


def walk_states(
    call: RecurrenceCall, arrays: tuple[Any, ...], outputs: list[Shape], constants: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A launch of `states_kernel` with the arrays of `pass_states`, and `reach` of `segments.reaches`."""
    from ejkernel_triton.linear_recurrence.states_kernels import states_kernel

    spec, config, batch = call.spec, call.config, outputs[1].shape[0]
    left, right, initial, correction, reach = arrays
    block_k, block_v, num_stages = config.state_block_k, config.state_block_v, config.state_stages
    if correction is not None:
        # The correction's product sums over all key channels, and programs share no sums.
        block_k = padded(spec.K, MIN_TILE)
        num_stages = state_stages(call, num_stages, block_k=block_k, block_v=block_v, written=True)
    made = launch(
        states_kernel,
        (left, right, call.gates, call.dt, initial, correction, *call.spans.of_walks, reach),
        outputs,
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * -(-spec.K // block_k) * -(-outputs[1].shape[4] // block_v),
        num_warps=config.state_warps,
        num_stages=num_stages,
        constants={
            "spec": spec,
            "LEFT_HEADS": left.shape[2],
            "RIGHT_HEADS": right.shape[2],
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "INITIAL": initial is not None,
            "CORRECT": correction is not None,
            "TRANSITIONS": False,
            "OFFSET": 0,
            "NO_START": False,
            "ENDS": 0,
            "EACH": 0,
            "REACH": 0,
            **constants,
        },
    )
    return made[0], made[1], made[2]


def walk(
    call: RecurrenceCall, initial: jax.Array | None, *, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states in one walk, which stores no other state; gates of channels in a delta rule alone.

    Args:
        call: What the stages share.
        initial: [B, SEQUENCES, H, K, V], where each walk begins; None is zeros.
        correction: W, [B, T, H, K], of a delta rule whose values are U.

    Returns:
        Outputs [B, T, H, V], 0 where no packed sequence is, and [B, SEQUENCES, H, K, V] float32.
    """
    from ejkernel_triton.linear_recurrence.walk_kernel import walk_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    arrays = (call.query, call.key, call.value, call.gates, call.dt, call.skip, initial)
    output, final = launch(
        walk_kernel,
        (*arrays, correction, call.scores, *call.spans.of_walks),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.query.dtype),
            Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
        ],
        batch=batch,
        # Packed rows have one more, which writes zeros where no sequence is.
        grid=batch * (spec.SEQUENCES + (spec.PER_SEQUENCE == 0)) * spec.H * -(-spec.V // config.walk_block_v),
        num_warps=config.walk_warps,
        num_stages=config.walk_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": padded(spec.K, MIN_TILE),
            "BLOCK_V": config.walk_block_v,
            "INITIAL": initial is not None,
            "CORRECT": correction is not None,
        },
    )
    return output, final


def channel_scores(call: RecurrenceCall) -> jax.Array | None:
    """What each token reads of what each token of its chunk wrote, with gates of channels.

    Returns:
        [B, H, CHUNKS * CHUNK, CHUNK] in the query's dtype, without the factor on outputs; None with other gates.
    """
    from ejkernel_triton.linear_recurrence.outputs_kernel import scores_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    if spec.WIDTH < 2:
        return None
    (scores,) = launch(
        scores_kernel,
        (call.query, call.key, call.gates, *call.spans.of_chunks),
        [Shape((batch, spec.H, spec.CHUNKS * spec.CHUNK, spec.CHUNK), call.query.dtype)],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.score_warps,
        num_stages=config.score_stages,
        constants={"spec": spec, "BLOCK_K": config.score_block_k},
    )
    return scores


def make_outputs(call: RecurrenceCall, states: jax.Array) -> jax.Array:
    """Outputs [B, T, H, V] from the states before the chunks; those of no packed sequence are undefined."""
    from ejkernel_triton.linear_recurrence.outputs_kernel import outputs_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    # Pairs with gates of channels come whole from a kernel before.
    block_t = spec.CHUNK if spec.WIDTH > 1 else min(spec.CHUNK, config.output_block_t)
    (output,) = launch(
        outputs_kernel,
        (call.query, call.key, call.value, call.gates, call.scores, call.dt, call.skip, states, *call.spans.of_chunks),
        [Shape((batch, spec.T, spec.H, spec.V), call.query.dtype)],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H * (spec.CHUNK // block_t) * -(-spec.V // config.output_block_v),
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": call.value.shape[2],
            "BLOCK_K": config.output_block_k,
            "BLOCK_V": config.output_block_v,
            "BLOCK_T": block_t,
        },
    )
    return output


def value_gradients(
    call: RecurrenceCall, cotangent: jax.Array, dstates: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of value, dt and skip.

    Args:
        call: What the stages share.
        cotangent: [B, T, H, V] of the output.
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.

    Returns:
        [B, T, HV, V] in the value's dtype; [B, T, H] float32 for dt, and for the skip's gradient at each token. The
        arrays of arguments that the record does not have are undefined.
    """
    from ejkernel_triton.linear_recurrence.gradients_kernels import value_gradients_kernel

    spec, config, value, batch = call.spec, call.config, call.value, call.query.shape[0]
    tiles, shared = -(-spec.V // config.output_block_v), shared_heads(spec.H, value.shape[2])
    # Where several groups share a head of values, their parts are float32, and XLA adds them up.
    groups = spec.H // shared
    # A program has a tile of value channels, so sums over channels are in parts; they are added below.
    numbers = (batch, tiles, spec.T, spec.H)
    dvalue, ddt, dskip = launch(
        value_gradients_kernel,
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
            *call.spans.of_chunks,
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
    """Gradients of query, key and gates.

    Args:
        call: What the stages share.
        cotangent: [B, T, H, V] of the output.
        states: [B, H, CHUNKS, K, V], the states before the chunks.
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.
        gates: Dtype of the gradients of gates; None if they are not wanted.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, and [B, T, H, WIDTH] of the log gates, which is of no use
        unless it is wanted.
    """
    from ejkernel_triton.linear_recurrence.gradients_kernels import key_gradients_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    tiles, shared = -(-spec.K // config.gradient_block_k), _added_up(spec)
    groups = spec.H // shared
    # Queries and keys of H heads are stored by head; shared ones as one part a group, which `over_groups` adds up.
    heads = [spec.H if n == spec.H else groups for n in (spec.HQ, spec.HK)]
    exact = [query_heads == n for query_heads, n in zip(heads, (spec.HQ, spec.HK), strict=True)]
    gate_shape = (batch, spec.T, spec.H, spec.K) if spec.WIDTH > 1 else (batch, tiles, spec.T, spec.H)
    dquery, dkey, dgates = launch(
        key_gradients_kernel,
        (call.query, call.key, call.value, call.gates, call.dt, cotangent, states, dstates, *call.spans.of_chunks),
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
    """Whether gates and dt are loaded as `tile.load_once` does."""
    return spec.DT and spec.PER_SEQUENCE == 0


def shared_heads(heads: int, fields: int) -> int:
    """How many of the heads that share one of a field's heads a program adds up: a power of two that divides them."""
    group = heads // fields
    return min(MAX_SHARED_HEADS, group & -group)


def _added_up(spec: RecurrenceSpec) -> int:
    """Heads whose gradients of queries and keys a program adds up, of those of the two that are shared."""
    found = [shared_heads(spec.H, n) for n in (spec.HQ, spec.HK) if n < spec.H]
    return min(found, default=1)


def over_groups(parts: jax.Array, field: jax.Array) -> jax.Array:
    """The gradient of a field from parts of groups of heads, [B, T, groups, d]."""
    if parts.shape[2] == field.shape[2]:
        return parts.astype(field.dtype)
    rows, tokens, heads, width = field.shape
    return parts.reshape(rows, tokens, heads, -1, width).sum(3).astype(field.dtype)


def _over_tiles(parts: jax.Array) -> jax.Array:
    """[B, tiles, T, H] summed over tiles."""
    return parts if parts.ndim == 1 else parts.sum(1)
