"""The stages of both passes, each one launch: gates, states, outputs, gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, Spans

GATE_COLUMNS = 64
"""Gates of a token that a program sums up."""

MOST_SHARED = 8
"""Heads that share queries, keys or values and whose gradients one program adds up."""


def cumulative_gates(record: LinearRecurrence, spec: RecurrenceSpec, spans: Spans) -> jax.Array | None:
    """Sums of log gates from each chunk's first token on, in powers of two.

    Returns:
        [B|1, H, CHUNKS * CHUNK, WIDTH] float32, where tokens behind a chunk's last repeat it; None without gates.
    """
    from ejkernel_triton.linear_recurrence.states_kernels import gates_kernel

    decay = record.decay
    if decay is None:
        return None
    rows, columns = decay.shape[0], spec.H * spec.WIDTH
    block = min(GATE_COLUMNS, max(16, 1 << (columns - 1).bit_length()))
    (cumulative,) = launch(
        gates_kernel,
        (decay, *spans),
        [Shape((rows, spec.H, spec.CHUNKS * spec.CHUNK, spec.WIDTH), jnp.float32)],
        batch=rows,
        grid=rows * spec.CHUNKS * -(-columns // block),
        num_warps=4,
        num_stages=1,
        constants={"spec": spec, "T": decay.shape[1], "BLOCK": block},
    )
    return cumulative


def pass_states(
    spec: RecurrenceSpec,
    config: ChunkPasses,
    left: jax.Array,
    right: jax.Array,
    gates: jax.Array | None,
    spans: Spans,
    initial: jax.Array | None,
    dtype: Any,
    *,
    dt: jax.Array | None = None,
    correction: jax.Array | None = None,
    reverse: bool = False,
    write: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states between chunks, or their gradients.

    Forwards, S = exp2(G_T) S + sum_j (exp2(G_T - G_j) dt_j left_j) right_j^T from chunk to chunk. In reverse,
    S = exp2(G_T) S + scale sum_i (exp2(G_i) left_i) right_i^T, without dt. What is written of each chunk is the state
    that the walk comes to it with: the one before it, or the gradient of the one after it.

    Args:
        spec: Constants.
        config: Tiles.
        left: [B, T, heads, K] keys, or queries.
        right: [B, T, heads, V] values, or the output's cotangent.
        gates: From `cumulative_gates`.
        spans: Of packed sequences.
        initial: [B, SEQUENCES, H, K, V], where each walk begins; None is zeros.
        dtype: Of the states that are written.
        dt: [B, T, H].
        correction: w, [B, T, H, K]: right_j - S^T w_j takes the place of right_j, with S the state before the chunk, and
            is written too. A program then owns all key channels.
        reverse: Whether to walk from the last chunk to the first.
        write: Whether states are written at all.

    Returns:
        States [B, H, CHUNKS, K, V], those at the end of the walks [B, SEQUENCES, H, K, V] float32, and the corrected
        right [B, T, H, V]. What was not asked for is of no use.
    """
    from ejkernel_triton.linear_recurrence.states_kernels import states_kernel

    batch, block_k, block_v = left.shape[0], config.state_block_k, config.state_block_v
    if correction is not None:
        block_k = max(16, 1 << (spec.K - 1).bit_length())
    states = (batch, spec.H, spec.CHUNKS, spec.K, spec.V) if write else (batch,)
    written = (batch, spec.T, spec.H, spec.V) if correction is not None else (batch,)
    made = launch(
        states_kernel,
        (left, right, gates, dt, initial, correction, spans.bounds, spans.firsts),
        [
            Shape(states, dtype),
            Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            Shape(written, right.dtype),
        ],
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * -(-spec.K // block_k) * -(-spec.V // block_v),
        num_warps=config.state_warps,
        num_stages=config.state_stages,
        constants={
            "spec": spec,
            "LEFT_HEADS": left.shape[2],
            "RIGHT_HEADS": right.shape[2],
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "REVERSE": reverse,
            "INITIAL": initial is not None,
            "WRITE": write,
            "CORRECT": correction is not None,
        },
    )
    return made[0], made[1], made[2]


def make_outputs(
    spec: RecurrenceSpec,
    config: ChunkPasses,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gates: jax.Array | None,
    states: jax.Array,
    spans: Spans,
    *,
    dt: jax.Array | None = None,
    skip: jax.Array | None = None,
) -> jax.Array:
    """Outputs [B, T, H, V] from the states before the chunks; those of no packed sequence are undefined."""
    from ejkernel_triton.linear_recurrence.outputs_kernel import outputs_kernel

    batch = query.shape[0]
    (output,) = launch(
        outputs_kernel,
        (query, key, value, gates, dt, skip, states, *spans),
        [Shape((batch, spec.T, spec.H, spec.V), query.dtype)],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H * -(-spec.V // config.output_block_v),
        num_warps=config.output_warps,
        num_stages=config.output_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": value.shape[2],
            "BLOCK_K": config.output_block_k,
            "BLOCK_V": config.output_block_v,
        },
    )
    return output


def value_gradients(
    spec: RecurrenceSpec,
    config: ChunkPasses,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cotangent: jax.Array,
    gates: jax.Array | None,
    dstates: jax.Array,
    spans: Spans,
    *,
    dt: jax.Array | None = None,
    skip: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of value, dt and skip.

    Returns:
        [B, T, Hv, V] in the value's dtype; [B, T, H] float32 twice, of the skip for each token. Those of what is not
        there are of no use.
    """
    from ejkernel_triton.linear_recurrence.gradients_kernels import value_gradients_kernel

    batch, tiles = query.shape[0], -(-spec.V // config.output_block_v)
    shared = shared_heads(spec.H, value.shape[2])
    groups = spec.H // shared
    numbers = (batch, tiles, spec.T, spec.H)
    dvalue, ddt, dskip = launch(
        value_gradients_kernel,
        (query, key, value, gates, dt, skip, cotangent, dstates, *spans),
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
    spec: RecurrenceSpec,
    config: ChunkPasses,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cotangent: jax.Array,
    gates: jax.Array | None,
    states: jax.Array,
    dstates: jax.Array,
    spans: Spans,
    *,
    dt: jax.Array | None = None,
    wants_gates: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and gates.

    Returns:
        [B, T, Hq, K] and [B, T, Hk, K] in the query's dtype, and [B, T, H, WIDTH] float32 of the log gates, which is of no
        use unless it is wanted.
    """
    from ejkernel_triton.linear_recurrence.gradients_kernels import key_gradients_kernel

    batch, tiles = query.shape[0], -(-spec.K // config.gradient_block_k)
    shared = math.gcd(shared_heads(spec.H, spec.HQ), shared_heads(spec.H, spec.HK))
    if 1 in (spec.H // spec.HQ, spec.H // spec.HK):  # one of the two has a head each, and is not added up
        shared = max(shared_heads(spec.H, spec.HQ), shared_heads(spec.H, spec.HK))
    groups = spec.H // shared
    parts = {name: spec.H if heads == spec.H else groups for name, heads in (("q", spec.HQ), ("k", spec.HK))}
    gate_shape = (batch, spec.T, spec.H, spec.K) if spec.WIDTH > 1 else (batch, tiles, spec.T, spec.H)
    dquery, dkey, dgates = launch(
        key_gradients_kernel,
        (query, key, value, gates, dt, cotangent, states, dstates, *spans),
        [
            Shape((batch, spec.T, parts["q"], spec.K), query.dtype if parts["q"] == spec.HQ else jnp.float32),
            Shape((batch, spec.T, parts["k"], spec.K), key.dtype if parts["k"] == spec.HK else jnp.float32),
            Shape(gate_shape if wants_gates else (batch,), jnp.float32),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * groups * tiles,
        num_warps=config.gradient_warps,
        num_stages=config.gradient_stages,
        constants={
            "spec": spec,
            "VALUE_HEADS": value.shape[2],
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "SHARED": shared,
            "GATES": wants_gates,
        },
    )
    if wants_gates and spec.WIDTH == 1:
        dgates = _over_tiles(dgates)[..., None]
    return over_groups(dquery, query), over_groups(dkey, key), dgates


def shared_heads(heads: int, fields: int) -> int:
    """How many of the heads that share one of a field's heads a program adds up: a power of two that divides them."""
    group = heads // fields
    return min(MOST_SHARED, group & -group)


def over_groups(parts: jax.Array, field: jax.Array) -> jax.Array:
    """The gradient of a field from parts of groups of heads, [B, T, groups, d]."""
    if parts.shape[2] == field.shape[2]:
        return parts.astype(field.dtype)
    rows, tokens, heads, width = field.shape
    return parts.reshape(rows, tokens, heads, -1, width).sum(3).astype(field.dtype)


def _over_tiles(parts: jax.Array) -> jax.Array:
    """[B, tiles, T, H] summed over tiles."""
    return parts if parts.ndim == 1 else parts.sum(1)
