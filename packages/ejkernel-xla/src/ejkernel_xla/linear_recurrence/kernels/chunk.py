"""One chunk of a linear recurrence: the states before it to its outputs and the states after it, as matrix products.

With weights w_ij = exp(sum of the gates of tokens j+1..i), S_0 the state before the chunk and u_j what token j writes:

    o_i = scale ((q_i * w_i0)^T S_0 + sum_{j <= i} <q_i, w_ij k_j> u_j) + skip v_i
    S_C = w_C0 S_0 + sum_j (w_Cj k_j) u_j^T

The delta rule's u solves a unit lower triangular system (the UT transform; Yang et al. 2024, arXiv:2412.06464):

    u_i + beta_i sum_{j < i} <k_i, w_ij k_j> u_j = beta_i (v_i - (k_i * w_i0)^T S_0)

whose matrix is inverted block by block. The low-rank term is a second write, with vectors and values of its own; see
`low_rank`.

Shapes: n rows and heads, counted together so that there is a single axis in front of the matrices; C tokens, a power of
two; all arrays are [n, C, ...] in the accumulator's dtype, where those that groups of heads share have n / group.
"""

import dataclasses
from typing import Any

import jax
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.planning.precision import product_precision
from ejkernel_xla.linear_recurrence.kernels.decay_weights import (
    DecaySpans,
    apply_triangle,
    decay_spans,
    off_diagonal_squares,
)
from ejkernel_xla.linear_recurrence.kernels.gates import KeyGates, key_gates
from ejkernel_xla.linear_recurrence.kernels.low_rank import low_rank_reads
from ejkernel_xla.linear_recurrence.kernels.products import (
    decay_columns,
    dot_products,
    multiply,
    repeat_along_first_axis,
    scale_vectors,
)
from ejkernel_xla.linear_recurrence.kernels.ut_solve import ut_solve


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTokens:
    """The tokens of a chunk; masked tokens have keys and gates of 0.

    Attributes:
        query: [n|m, C, K].
        key: [n|m, C, K].
        value: [n|m, C, V].
        decay: [n, C, K|1] log gates, or None.
        value_decay: [n, C, V] log gates, or None.
        beta: [n, C], or None.
        dt: [n, C], or None.
        skip: [n, C], the same for all tokens, or None.
        low_rank_write: [n, C, K], or None.
        low_rank_read: [n, C, K], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array | None
    value_decay: jax.Array | None
    beta: jax.Array | None
    dt: jax.Array | None
    skip: jax.Array | None
    low_rank_write: jax.Array | None
    low_rank_read: jax.Array | None


def advance(state: jax.Array, chunk: ChunkTokens, scale: float, precision: Any) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [n, C, V] and the states [n, K, V] after a chunk, from the states before it."""
    count, keys = state.shape[0], key_gates(chunk.decay)
    write = _compute_writes(state, chunk, keys, precision)
    low_rank = _low_rank_write(state, chunk, write, keys, precision)
    after = _state_after(state, chunk, write, keys, precision)
    if low_rank is not None:
        after = after + keys.update(*low_rank, precision)
    if write.shape[-2] == 1:  # one token reads what it has just written, as the formula says
        output = scale * multiply(repeat_along_first_axis(chunk.query, count), after, precision)
    else:
        output = _read_of_tokens(state, chunk, write, keys, precision)
        if low_rank is not None:
            vectors, values = low_rank
            output = output + multiply(keys.pair_products(chunk.query, vectors, count, precision), values, precision)
        output = scale * output
    if chunk.skip is not None:
        output = output + scale_vectors(repeat_along_first_axis(chunk.value, count), chunk.skip)
    return output, after


def _read_of_tokens(
    state: jax.Array, chunk: ChunkTokens, write: jax.Array, keys: KeyGates, precision: Any
) -> jax.Array:
    """Returns what the tokens read, [n, C, V]: inter-chunk from the states before the chunk, intra-chunk from each
    other.
    """
    before = keys.read(chunk.query, state, precision)
    if (values := _value_levels(chunk)) is None:
        return before + multiply(
            keys.pair_products(chunk.query, chunk.key, state.shape[0], precision), write, precision
        )
    return before * values[-1].decay_since_start[..., 0, :, :] + _intra_chunk_read(chunk, write, values, precision)


def next_state(state: jax.Array, chunk: ChunkTokens, precision: Any) -> jax.Array:
    """Returns the states after a chunk alone."""
    keys = key_gates(chunk.decay)
    write = _compute_writes(state, chunk, keys, precision)
    low_rank = _low_rank_write(state, chunk, write, keys, precision)
    after = _state_after(state, chunk, write, keys, precision)
    return after if low_rank is None else after + keys.update(*low_rank, precision)


def _low_rank_write(
    state: jax.Array, chunk: ChunkTokens, write: jax.Array, keys: KeyGates, precision: Any
) -> tuple[jax.Array, jax.Array] | None:
    """Returns the vectors [n, C, K] and values [n, C, V] of the low-rank write; None where there is none."""
    if chunk.low_rank_write is None or chunk.low_rank_read is None:
        return None
    vectors = (chunk.low_rank_write, chunk.low_rank_read)
    return chunk.low_rank_write, low_rank_reads(state, vectors, chunk.key, write, keys, precision)


def _state_after(state: jax.Array, chunk: ChunkTokens, write: jax.Array, keys: KeyGates, precision: Any) -> jax.Array:
    if (values := _value_levels(chunk)) is not None:
        state = decay_columns(state, values[-1].decay_since_start[..., 0, -1, :])
        # Gates of values decay columns of the state, so they multiply what is written, not the keys.
        write = write * values[-1].decay_until_end[..., 0, :, :]
    return keys.add(state, chunk.key, write, precision)


def _compute_writes(state: jax.Array, chunk: ChunkTokens, keys: KeyGates, precision: Any) -> jax.Array:
    """Returns what every token writes, [n, C, V]."""
    count = state.shape[0]
    value = repeat_along_first_axis(chunk.value, count)
    if chunk.beta is None:
        return value if chunk.dt is None else scale_vectors(value, chunk.dt)
    # The state before the chunk answers first; what tokens of the chunk write to each other is the triangular system.
    rhs = scale_vectors(value - keys.read(chunk.key, state, precision), chunk.beta)
    if value.shape[-2] == 1:
        return rhs
    return ut_solve(
        scale_vectors(keys.pair_products(chunk.key, chunk.key, count, precision), chunk.beta), rhs, precision
    )


def _value_levels(chunk: ChunkTokens) -> list[DecaySpans] | None:
    return None if chunk.value_decay is None else decay_spans(chunk.value_decay)


def _intra_chunk_read(chunk: ChunkTokens, write: jax.Array, values: list[DecaySpans], precision: Any) -> jax.Array:
    """Returns what the tokens of a chunk read from each other with gates of the values' channels, [n, C, V]."""
    count = write.shape[0]
    query, key = repeat_along_first_axis(chunk.query, count), repeat_along_first_axis(chunk.key, count)
    squares = off_diagonal_squares(query, key, None if chunk.decay is None else decay_spans(chunk.decay), precision)
    return apply_triangle(dot_products(query, key), squares, write, values, precision)


def precision(record: LinearRecurrence) -> lax.Precision | None:
    """Returns precision of the matrix products: 16-bit inputs do not need float32's last digits, others do."""
    return product_precision(record.query.dtype, record.precision)
