"""The stages of the delta rule's backward pass, each one launch; see `delta_gradients_kernels`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops.device import current_device
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, DeltaPasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall
from ejkernel_triton.linear_recurrence.stages import over_groups
from ejkernel_triton.sizes import padded


class StateGradients(NamedTuple):
    """Gradients that state passing from the last chunk to the first makes.

    Attributes:
        dstates: [B, H, CHUNKS, K, V], gradients of the states after the chunks.
        first: [B, SEQUENCES, H, K, V] float32, gradients of the states before the first chunks.
        dwritten: [B, T, H, V], gradients of what tokens write.
    """

    dstates: jax.Array
    first: jax.Array
    dwritten: jax.Array


def intra_chunk(call: RecurrenceCall, cotangent: jax.Array) -> jax.Array:
    """The intra-chunk part of `StateGradients.dwritten`, [B, T, H, V] in the cotangent's dtype."""
    from ejkernel_triton.linear_recurrence.delta_gradients_kernels import intra_chunk_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    (made,) = launch(
        intra_chunk_kernel,
        (call.query, call.key, call.gates, call.scores, cotangent, *call.spans.of_chunks),
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
    correction: jax.Array,
    cotangent: jax.Array,
    within: jax.Array,
    final: jax.Array,
    dtype: Any,
) -> StateGradients:
    """The gradients of the states between chunks.

    Args:
        call: What the stages share; with gates of channels, with decayed queries and keys.
        correction: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        within: [B, T, H, V] from `intra_chunk`.
        final: [B, SEQUENCES, H, K, V], gradients of the final states.
        dtype: Dtype of the gradients of states.
    """
    spec, batch = call.spec, call.query.shape[0]
    states, tokens = (batch, spec.H, spec.CHUNKS, spec.K, spec.V), (batch, spec.T, spec.H, spec.V)
    return _walk_back(call, (correction, cotangent, within, final, None), Shape(states, dtype), tokens)


def gradient_ends(
    call: RecurrenceCall,
    correction: jax.Array,
    cotangent: jax.Array,
    within: jax.Array,
    reach: jax.Array | None,
) -> jax.Array:
    """The gradients of the states before segments, from walks that begin with zeros behind them.

    Args:
        call: What the stages share, whose sequences are the segments that are walked, the last ones of the row.
        correction: W [B, T, H, K].
        cotangent: [B, T, H, V] of the output.
        within: [B, T, H, V] from `intra_chunk`.
        reach: How far gradients reach, from `segments.reaches`; None if that is not known.

    Returns:
        [B, SEQUENCES, H, K, V] float32.
    """
    call = dataclasses.replace(call, config=_first_walk(delta_config(call)))
    nothing = (call.query.shape[0],)
    arrays = (correction, cotangent, within, None, reach)
    return _walk_back(call, arrays, Shape(nothing, jnp.float32), nothing).first


def _walk_back(call: RecurrenceCall, arrays: tuple[Any, ...], states: Shape, tokens: tuple[int, ...]) -> StateGradients:
    """A launch of `state_gradients_kernel`.

    Args:
        call: What the stages share.
        arrays: correction, cotangent, within, final and reach. Without final nothing is stored but where walks end.
        states: The gradients of states.
        tokens: Shape of those of what tokens write.
    """
    from ejkernel_triton.linear_recurrence.delta_gradients_kernels import state_gradients_kernel

    spec, config, batch = call.spec, delta_config(call), call.query.shape[0]
    *given, final, reach = arrays
    made = launch(
        state_gradients_kernel,
        (call.query, call.key, call.gates, *given, final, *call.spans.of_walks, reach),
        [
            states,
            Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            Shape(tokens, call.query.dtype),
        ],
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * -(-spec.V // config.reverse_block_v),
        num_warps=config.reverse_warps,
        num_stages=_state_gradient_stages(call),
        constants={
            "spec": spec,
            "BLOCK_K": padded(spec.K, MIN_TILE),
            "BLOCK_V": config.reverse_block_v,
            "FINAL": final is not None,
            "WRITE": final is not None,
            "OFFSET": -(-spec.CHUNKS // spec.PER_SEQUENCE) - spec.SEQUENCES if spec.PER_SEQUENCE else 0,
            "REACH": 0 if reach is None else reach.shape[3],
        },
    )
    return StateGradients(*made)


def delta_config(call: RecurrenceCall) -> DeltaPasses:
    """The configuration of a call of the delta rule."""
    assert isinstance(call.config, DeltaPasses)  # the type that the implementation declares
    return call.config


def _first_walk(config: DeltaPasses) -> DeltaPasses:
    """Two programs a multiprocessor, as in `stages.end_states`."""
    return dataclasses.replace(config, reverse_block_v=min(config.reverse_block_v, 32))


def _state_gradient_stages(call: RecurrenceCall) -> int:
    """Pipeline stages of the reverse walk: chunks that shared memory has room for, at most the configuration's."""
    spec, config = call.spec, delta_config(call)
    key_channels = padded(spec.K, MIN_TILE)
    # Operands of the products wait in shared memory: q, k and W of all key channels, do and A^T do of the tile.
    bytes_of_chunk = spec.CHUNK * (3 * key_channels + 2 * config.reverse_block_v) * call.query.dtype.itemsize
    room = chip_of(current_device()).shared_memory * 4 // 5
    return max(1, min(config.reverse_stages, room // bytes_of_chunk))


def inverse_gradients(
    call: RecurrenceCall, beta: jax.Array, inverse: jax.Array, dwritten: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients through the inverse.

    Args:
        call: What the stages share.
        beta: [B, T, H].
        inverse: (I + L)^-1, from `delta.Corrections`.
        dwritten: Gradients of what tokens write, from `StateGradients`.

    Returns:
        Gradient of value in its shape and dtype; dy [B, T, H, V], that gradient without its factor beta; [B, T, H]
        float32, the part of beta's gradient that values make.
    """
    from ejkernel_triton.linear_recurrence.delta_gradients_kernels import inverse_gradients_kernel

    spec, config, batch, value = call.spec, call.config, call.query.shape[0], call.value
    tokens = (batch, spec.T, spec.H, spec.V)
    dy, dvalue, dbeta = launch(
        inverse_gradients_kernel,
        (value, beta, inverse, dwritten, *call.spans.of_chunks),
        [
            Shape(tokens, dwritten.dtype),
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
    """Gradients of query, key, gates and, as far as keys make it, beta.

    Args:
        call: What the stages share, with what tokens write in place of their values.
        beta: [B, T, H].
        cotangent: [B, T, H, V] of the output.
        dy: [B, T, H, V] from `inverse_gradients`.
        states: [B, H, CHUNKS, K, V], those before the chunks, and the gradients of those after them.
        gates: Dtype of the gradient of the gates; None if it is not wanted.

    Returns:
        [B, T, HQ, K] and [B, T, HK, K] in the query's dtype, [B, T, H, WIDTH] of the log gates, and [B, T, H].
    """
    from ejkernel_triton.linear_recurrence.delta_gradients_kernels import delta_key_gradients_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    tiles = -(-spec.K // config.gradient_block_k)
    numbers, tokens = (batch, tiles, spec.T, spec.H), (batch, spec.T, spec.H, spec.K)
    whole = [call.query.dtype if n == spec.H else jnp.float32 for n in (spec.HQ, spec.HK)]
    gate_shape = (batch,) if gates is None else tokens if spec.WIDTH > 1 else numbers
    dquery, dkey, dgates, dbeta = launch(
        delta_key_gradients_kernel,
        (call.query, call.key, call.value, call.gates, beta, cotangent, dy, *states, *call.spans.of_chunks),
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
            "BLOCK_K": config.gradient_block_k,
            "BLOCK_V": config.gradient_block_v,
            "GATES": gates is not None,
        },
    )
    if gates is not None and spec.WIDTH == 1:
        dgates = dgates.sum(1)[..., None]
    return over_groups(dquery, call.query), over_groups(dkey, call.key), dgates, dbeta.sum(1)
