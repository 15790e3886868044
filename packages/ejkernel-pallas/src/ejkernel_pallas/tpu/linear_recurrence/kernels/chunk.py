"""Processes one chunk of some heads: from the state before it to its outputs and the state after it, by matrix
products.

With weights w_ij = exp(sum of the gates of tokens j+1..i), S_0 the state before the chunk and u_j the write of token j:

    o_i = scale ((q_i * w_i0)^T S_0 + sum_{j <= i} <q_i, w_ij k_j> u_j) + skip v_i
    S_C = w_C0 S_0 + sum_j (w_Cj k_j) u_j^T
    u_i + beta_i sum_{j < i} <k_i, w_ij k_j> u_j = beta_i (v_i - (k_i * w_i0)^T S_0)      for the delta rule, else v_i

A low-rank term's tokens write twice, with a key and with another vector: [C] keys and writes are then [2 C].

JAX differentiates it inside of the backward kernel; functions with a cheaper rule define their own.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import (
    BlockDecayWeights,
    HeadLogDecaySums,
    KeyDecayWeights,
    is_split_at_level,
    last_row,
    make_block_decay_weights,
    make_key_decay_weights,
)
from ejkernel_pallas.tpu.linear_recurrence.kernels.low_rank import low_rank_reads, written_vectors
from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot, row_and_column_indices
from ejkernel_pallas.tpu.linear_recurrence.kernels.ut_transform import solve_unit_lower
from ejkernel_pallas.tpu.linear_recurrence.spec import ChunkArithmetic

ArraysPerHead = tuple[jax.Array, ...]
"""One array per head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTokens:
    """The tokens of a chunk; padding tokens have zeros.

    Attributes:
        query: [C, K].
        key: [C, K].
        value: [C, V].
        decay: [C, K] log gates, or sums of gates that all channels share.
        value_decay: [C, V] log gates.
        beta: [C, 1]; with it the recurrence is a delta rule.
        dt: [C, 1], factor on a token's write.
        skip: [C, 1], factor on the value that a token adds to its output.
        low_rank_write: [C, K], the vectors with which tokens write what they read of the state before them.
        low_rank_read: [C, K], the vectors with which they read it.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array | HeadLogDecaySums | None = None
    value_decay: jax.Array | None = None
    beta: jax.Array | None = None
    dt: jax.Array | None = None
    skip: jax.Array | None = None
    low_rank_write: jax.Array | None = None
    low_rank_read: jax.Array | None = None


def advance_chunk(
    states: ArraysPerHead, heads: tuple[ChunkTokens, ...], arithmetic: ChunkArithmetic
) -> tuple[ArraysPerHead, ArraysPerHead]:
    """Returns outputs [C, V] and states [K, V] of some heads after a chunk.

    Heads are independent. Each stage is computed for all of them before the next one starts, so that one head's
    products run while another's wait for their operands.
    """
    key_weights, value_weights = _compute_decay_weights(heads)
    writes = _compute_writes(states, heads, key_weights, arithmetic.keeps_float32)
    reads = [
        arithmetic.output_scale * _read_state_and_writes(state, x, key, value, write, arithmetic.keeps_float32)
        for state, x, key, value, write in zip(states, heads, key_weights, value_weights, writes, strict=True)
    ]
    outputs = [
        read if x.skip is None else read + x.skip * x.value.astype(jnp.float32)
        for read, x in zip(reads, heads, strict=True)
    ]
    return tuple(outputs), _compute_states_after_chunk(
        states, heads, key_weights, value_weights, writes, arithmetic.keeps_float32
    )


def states_after_chunk(
    states: ArraysPerHead, heads: tuple[ChunkTokens, ...], arithmetic: ChunkArithmetic
) -> ArraysPerHead:
    """Returns only the states after a chunk."""
    key_weights, value_weights = _compute_decay_weights(heads)
    return _compute_states_after_chunk(
        states,
        heads,
        key_weights,
        value_weights,
        _compute_writes(states, heads, key_weights, arithmetic.keeps_float32),
        arithmetic.keeps_float32,
    )


def _compute_decay_weights(
    heads: tuple[ChunkTokens, ...],
) -> tuple[list[KeyDecayWeights], list[tuple[BlockDecayWeights, ...] | None]]:
    """Returns the weights of all heads' gates, of keys and of values."""
    return [make_key_decay_weights(x.decay) for x in heads], [
        None if x.value_decay is None else make_block_decay_weights(x.value_decay) for x in heads
    ]


def _compute_writes(
    states: ArraysPerHead, heads: tuple[ChunkTokens, ...], key_weights: list[KeyDecayWeights], keeps_float32: bool
) -> ArraysPerHead:
    """Returns every token's write, [C, V], or [2 C, V] with a low-rank term."""
    rhs: list[jax.Array] = []
    matrices: list[jax.Array] = []
    for state, x, key in zip(states, heads, key_weights, strict=True):
        if x.beta is not None:
            # First the state before the chunk is read; the tokens' effect on each other is the triangular system.
            rhs.append(x.beta * (x.value - key.read_state(x.key, state, keeps_float32)))
            matrices.append(x.beta * key.pair_products(x.key, x.key, keeps_float32))
    if not rhs:
        writes = tuple(x.value if x.dt is None else x.value * x.dt for x in heads)
        if heads[0].low_rank_read is None:
            return writes
        reads = low_rank_reads(states, heads, key_weights, writes, keeps_float32)
        return tuple(jnp.concatenate(x, axis=0) for x in zip(writes, reads, strict=True))
    return solve_unit_lower(tuple(matrices), tuple(rhs), keeps_float32)


def _read_state_and_writes(
    state: jax.Array,
    x: ChunkTokens,
    key_weights: KeyDecayWeights,
    value_weights: tuple[BlockDecayWeights, ...] | None,
    token_writes: jax.Array,
    keeps_float32: bool,
) -> jax.Array:
    """Returns the reads of tokens from the state before the chunk and from each other, [C, V]."""
    before = key_weights.read_state(x.query, state, keeps_float32)
    if value_weights is None:
        return before + dot(
            key_weights.pair_products(x.query, written_vectors(x), keeps_float32), token_writes, (1, 0), keeps_float32
        )
    return before * value_weights[-1].decay_since_start + _read_writes_per_channel(
        x, key_weights, token_writes, value_weights, keeps_float32
    )


def _read_writes_per_channel(
    x: ChunkTokens,
    key_weights: KeyDecayWeights,
    token_writes: jax.Array,
    value_weights: tuple[BlockDecayWeights, ...],
    keeps_float32: bool,
) -> jax.Array:
    """Returns the reads of tokens from each other with gates per value channel, [C, V]: one product per level."""
    row, column = row_and_column_indices(token_writes.shape[0])
    scores = key_weights.pair_products(x.query, x.key, keeps_float32)
    total = jnp.sum(x.query * x.key, axis=1, keepdims=True) * token_writes
    for level, span in enumerate(value_weights[:-1]):
        masked_scores = jnp.where(is_split_at_level(row, column, level), scores, 0.0)
        total = (
            total
            + dot(masked_scores, token_writes * span.decay_until_end, (1, 0), keeps_float32) * span.decay_since_start
        )
    return total


def _compute_states_after_chunk(
    states: ArraysPerHead,
    heads: tuple[ChunkTokens, ...],
    key_weights: list[KeyDecayWeights],
    value_weights: list[tuple[BlockDecayWeights, ...] | None],
    writes: ArraysPerHead,
    keeps_float32: bool,
) -> ArraysPerHead:
    found: list[jax.Array] = []
    for state, x, key, value, write in zip(states, heads, key_weights, value_weights, writes, strict=True):
        before, written = state, write
        if value is not None:
            # Gates per value channel decay columns of the state, so they multiply the writes, not the keys.
            before, written = state * last_row(value[-1].decay_since_start), write * value[-1].decay_until_end
        found.append(key.add(before, written_vectors(x), written, keeps_float32))
    return tuple(found)
