"""Processes one chunk of some heads: from the state before it to its outputs and the state after it, by matrix
products.

With weights w_ij = exp(sum of the gates of tokens j+1..i), S_0 the state before the chunk and u_j the write of token j:

    o_i = scale ((q_i * w_i0)^T S_0 + sum_{j <= i} <q_i, w_ij k_j> u_j) + skip v_i
    S_C = w_C0 S_0 + sum_j (w_Cj k_j) u_j^T
    u_i + beta_i sum_{j < i} <k_i, w_ij k_j> u_j = beta_i (v_i - (k_i * w_i0)^T S_0)      for the delta rule, else v_i

JAX differentiates it inside of the backward kernel; functions with a cheaper rule define their own.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import (
    HeadDecay,
    KeyGates,
    Span,
    is_split_at_level,
    key_gates,
    last_row,
    make_spans,
)
from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot, indices
from ejkernel_pallas.tpu.linear_recurrence.kernels.ut_transform import solve_unit_lower
from ejkernel_pallas.tpu.linear_recurrence.spec import ChunkArithmetic

Heads = tuple[jax.Array, ...]
"""One array per head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
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
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array | HeadDecay | None = None
    value_decay: jax.Array | None = None
    beta: jax.Array | None = None
    dt: jax.Array | None = None
    skip: jax.Array | None = None


def advance_chunk(states: Heads, heads: tuple[Tokens, ...], arithmetic: ChunkArithmetic) -> tuple[Heads, Heads]:
    """Returns outputs [C, V] and states [K, V] of some heads after a chunk.

    Heads are independent. Each stage is computed for all of them before the next one starts, so that one head's
    products run while another's wait for their operands.
    """
    keys, values = _load_gates(heads)
    writes = _compute_writes(states, heads, keys, arithmetic.exact)
    reads = [
        arithmetic.output_scale * _read_state(state, x, key, value, write, arithmetic.exact)
        for state, x, key, value, write in zip(states, heads, keys, values, writes, strict=True)
    ]
    outputs = [
        read if x.skip is None else read + x.skip * x.value.astype(jnp.float32)
        for read, x in zip(reads, heads, strict=True)
    ]
    return tuple(outputs), _state_after(states, heads, keys, values, writes, arithmetic.exact)


def states_after_chunk(states: Heads, heads: tuple[Tokens, ...], arithmetic: ChunkArithmetic) -> Heads:
    """Returns only the states after a chunk."""
    keys, values = _load_gates(heads)
    return _state_after(
        states, heads, keys, values, _compute_writes(states, heads, keys, arithmetic.exact), arithmetic.exact
    )


def _load_gates(heads: tuple[Tokens, ...]) -> tuple[list[KeyGates], list[tuple[Span, ...] | None]]:
    """Returns the weights of all heads' gates, of keys and of values."""
    return [key_gates(x.decay) for x in heads], [
        None if x.value_decay is None else make_spans(x.value_decay) for x in heads
    ]


def _compute_writes(states: Heads, heads: tuple[Tokens, ...], keys: list[KeyGates], exact: bool) -> Heads:
    """Returns every token's write, [C, V]."""
    rhs: list[jax.Array] = []
    matrices: list[jax.Array] = []
    for state, x, key in zip(states, heads, keys, strict=True):
        if x.beta is not None:
            # First the state before the chunk is read; the tokens' effect on each other is the triangular system.
            rhs.append(x.beta * (x.value - key.read(x.key, state, exact)))
            matrices.append(x.beta * key.pair_products(x.key, x.key, exact))
    if not rhs:
        return tuple(x.value if x.dt is None else x.value * x.dt for x in heads)
    return solve_unit_lower(tuple(matrices), tuple(rhs), exact)


def _read_state(
    state: jax.Array, x: Tokens, keys: KeyGates, values: tuple[Span, ...] | None, write: jax.Array, exact: bool
) -> jax.Array:
    """Returns the reads of tokens from the state before the chunk and from each other, [C, V]."""
    before = keys.read(x.query, state, exact)
    if values is None:
        return before + dot(keys.pair_products(x.query, x.key, exact), write, (1, 0), exact)
    return before * values[-1].decay_since_start + _decayed_reads(x, keys, write, values, exact)


def _decayed_reads(x: Tokens, keys: KeyGates, write: jax.Array, values: tuple[Span, ...], exact: bool) -> jax.Array:
    """Returns the reads of tokens from each other with gates per value channel, [C, V]: one product per level."""
    row, column = indices(write.shape[0])
    scores = keys.pair_products(x.query, x.key, exact)
    total = jnp.sum(x.query * x.key, axis=1, keepdims=True) * write
    for level, span in enumerate(values[:-1]):
        masked_scores = jnp.where(is_split_at_level(row, column, level), scores, 0.0)
        total = total + dot(masked_scores, write * span.decay_until_end, (1, 0), exact) * span.decay_since_start
    return total


def _state_after(
    states: Heads,
    heads: tuple[Tokens, ...],
    keys: list[KeyGates],
    values: list[tuple[Span, ...] | None],
    writes: Heads,
    exact: bool,
) -> Heads:
    found: list[jax.Array] = []
    for state, x, key, value, write in zip(states, heads, keys, values, writes, strict=True):
        before, written = state, write
        if value is not None:
            # Gates per value channel decay columns of the state, so they multiply the writes, not the keys.
            before, written = state * last_row(value[-1].decay_since_start), write * value[-1].decay_until_end
        found.append(key.add(before, x.key, written, exact))
    return tuple(found)
