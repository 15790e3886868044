"""The forward kernel of few tokens per sequence, whose states are in slots: token by token, on the vector unit.

grid (1, heads / heads per step, chunks that have tokens)      chunks in order; a decode step has one chunk per sequence
HBM  slots [S, H, K, V] ── block (slot, heads), double buffer ──► initial_state ─┐
     query, key, value, gates of 1, 2 or 4 tokens [heads, channels] ─────────────┴─► state in registers ─► output
HBM  slots ◄── the same block, double buffer ── final_state ◄── state, kept in VMEM for the sequence's next chunk

A chunk's products would fill the matrix unit with padding, and with a state of which few rows are read. Here each
register of a state takes seven multiplications and additions per token, and four more with a low-rank term. Keys lie
along lanes in memory and along rows in a state: keys of all heads are transposed together, and each column is repeated
in all lanes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import GridStep, grid_step_of
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRefs:
    """Refs of the kernel; a field that the call does not have is None.

    Attributes:
        chunk_table: int32 [chunks] of `ChunkPlan`.
        query: [C, heads of the step, K], with fewer heads if several heads of the state share one.
        key: In the layout of `query`.
        value: In the layout of `query`, with V channels.
        decay: Log gates per key channel, in the layout of `query`.
        value_decay: Log gates per value channel, in the layout of `value`.
        low_rank_write: In the layout of `query`.
        low_rank_read: In the layout of `query`.
        scalars: float32 [C, heads of the step, fields], the fields of `RecurrenceSpec.step_scalar_names`.
        initial_state: [heads, K, V], the slot before the sequence.
        output: [C, heads, V].
        final_state: [heads, K, V], the slot after the sequence.
        state: Scratch, float32 [heads, K, V]: the states between chunks.
    """

    chunk_table: Ref
    query: Ref
    key: Ref
    value: Ref
    initial_state: Ref
    output: Ref
    final_state: Ref
    state: Ref
    decay: Ref = None
    value_decay: Ref = None
    low_rank_write: Ref = None
    low_rank_read: Ref = None
    scalars: Ref = None


@dataclasses.dataclass(frozen=True)
class StepToken:
    """One token of all heads of a grid step, float32.

    Attributes:
        value: [heads, V].
        query_key_product: [heads, 1], the products of the token's own query and key.
        query_columns: [K, query heads].
        key_columns: [K, key heads].
        decay_columns: [K, decay heads], exponentials of gates per key channel.
        row_decay: [heads, V], exponentials of gates that a head's key channels share; None without.
        beta: [heads, V], the same in every lane.
        dt: [heads, V], the same in every lane.
        skip: [heads, V], the same in every lane.
        low_rank: The token's low-rank term; None without.
    """

    value: jax.Array
    query_key_product: jax.Array
    query_columns: jax.Array
    key_columns: jax.Array
    decay_columns: jax.Array | None
    row_decay: jax.Array | None
    beta: jax.Array | None
    dt: jax.Array | None
    skip: jax.Array | None
    low_rank: "LowRankToken | None"


@dataclasses.dataclass(frozen=True)
class LowRankToken:
    """The low-rank term of a token of all heads of a grid step, float32.

    Attributes:
        write_columns: [K, heads].
        read_columns: [K, heads].
        query_write_product: [heads, 1], the products of the token's own query and its vector that writes.
    """

    write_columns: jax.Array
    read_columns: jax.Array
    query_write_product: jax.Array


def recurrent_step(
    refs: StepRefs, *, spec: RecurrenceSpec, chunks_per_row: int, is_packed: bool, states_in_slots: bool
) -> None:
    """Processes one chunk of some heads."""
    grid_step = grid_step_of(refs, chunks_per_row=chunks_per_row, is_packed=is_packed, states_in_slots=states_in_slots)

    # The first chunk's block of the final states goes back to a slot even where no step writes it.
    @pl.when((pl.program_id(2) == 0) & ~grid_step.has_slot)
    def _() -> None:
        refs.final_state[...] = refs.initial_state[...]

    tokens = [_load_token(refs, spec, index) for index in range(spec.chunk_tokens)]
    reads: list[list[jax.Array]] = [[] for _ in tokens]
    for head in range(spec.heads_per_step):
        state = _load_state(refs, grid_step, head)
        for token, rows in zip(tokens, reads, strict=True):
            read, state = _advance_token(state, token, spec, head)
            rows.append(read)
        _store_state(refs, grid_step, head, state)
    for index, rows in enumerate(reads):
        refs.output[index] = jnp.concatenate(rows, axis=0).astype(refs.output.dtype)


def _load_state(refs: StepRefs, grid_step: GridStep, head: int) -> jax.Array:
    """Loads a head's state before the chunk; zeros of a sequence without a slot."""
    # Selected, not multiplied: the slot of another sequence may hold NaN.
    initial = jnp.where(grid_step.has_slot, refs.initial_state[head].astype(jnp.float32), 0.0)
    return jnp.where(grid_step.is_first, initial, refs.state[head])


def _store_state(refs: StepRefs, grid_step: GridStep, head: int, state: jax.Array) -> None:
    """Stores a head's state after the chunk, and into the slot if there is one; that of the last chunk stays."""
    refs.state[head] = state
    refs.final_state[head] = jnp.where(grid_step.has_slot, state.astype(refs.final_state.dtype), refs.final_state[head])


def _load_token(refs: StepRefs, spec: RecurrenceSpec, index: int) -> StepToken:
    """Loads a token of all heads."""
    heads = spec.heads_per_step
    query, key, value = (getattr(refs, name)[index].astype(jnp.float32) for name in ("query", "key", "value"))
    scalars: dict[str, jax.Array] = {}
    for number, name in enumerate(spec.step_scalar_names):
        column = refs.scalars[index, :, number : number + 1]
        scalars[name] = jnp.broadcast_to(column, (heads, spec.value_dim))
    row_decay = jnp.exp(scalars["decay"]) if "decay" in scalars else None
    if refs.value_decay is not None:
        by_value = jnp.exp(_repeat_heads(refs.value_decay[index].astype(jnp.float32), heads))
        row_decay = by_value if row_decay is None else row_decay * by_value
    decay = None if refs.decay is None else jnp.exp(refs.decay[index].astype(jnp.float32))
    queries, low_rank = _repeat_heads(query, heads), None
    if refs.low_rank_read is not None:
        write, read = (refs.low_rank_write[index].astype(jnp.float32), refs.low_rank_read[index].astype(jnp.float32))
        products = queries * _repeat_heads(write, heads)
        low_rank = LowRankToken(write.T, read.T, jnp.sum(products, axis=1, keepdims=True))
    products = queries * _repeat_heads(key, heads)
    return StepToken(
        value=_repeat_heads(value, heads),
        query_key_product=jnp.sum(products, axis=1, keepdims=True),
        query_columns=query.T,
        key_columns=key.T,
        decay_columns=None if decay is None else decay.T,
        row_decay=row_decay,
        beta=scalars.get("beta"),
        dt=scalars.get("dt"),
        skip=scalars.get("skip"),
        low_rank=low_rank,
    )


def _repeat_heads(rows: jax.Array, heads: int) -> jax.Array:
    """Returns [count, n] as [heads, n], each row as often as heads share it."""
    count = rows.shape[0]
    if count == heads:
        return rows
    parts: Sequence[Any] = [jnp.broadcast_to(rows[n : n + 1], (heads // count, rows.shape[1])) for n in range(count)]
    return jnp.concatenate(parts, axis=0)


def _column_of_head(columns: jax.Array, head: int, spec: RecurrenceSpec) -> jax.Array:
    """Returns a head's column of [K, count] in all lanes, [K, V]."""
    at = head * columns.shape[1] // spec.heads_per_step
    return jnp.broadcast_to(columns[:, at : at + 1], (spec.key_dim, spec.value_dim))


def _advance_token(state: jax.Array, token: StepToken, spec: RecurrenceSpec, head: int) -> tuple[jax.Array, jax.Array]:
    """Returns the output [1, V] of a token of a head, and the state [K, V] after it."""
    row = slice(head, head + 1)
    row_decay = None if token.row_decay is None else token.row_decay[row]

    def read_state(columns: jax.Array) -> jax.Array:
        total = jnp.sum(state * _column_of_head(columns, head, spec), axis=0, keepdims=True)
        return total if row_decay is None else total * row_decay

    # The low-rank term reads the state before its decay.
    low_rank_read = None
    if token.low_rank is not None:
        columns = _column_of_head(token.low_rank.read_columns, head, spec)
        low_rank_read = jnp.sum(state * columns, axis=0, keepdims=True)
    if token.decay_columns is not None:
        state = state * _column_of_head(token.decay_columns, head, spec)
    value = token.value[row]
    if token.beta is not None:
        write = token.beta[row] * (value - read_state(token.key_columns))
    else:
        write = value if token.dt is None else value * token.dt[row]
    # The read of the state after the token: of the state before it, and of the token's own write.
    read = read_state(token.query_columns) + token.query_key_product[row] * write
    if token.low_rank is not None and low_rank_read is not None:
        read = read + token.low_rank.query_write_product[row] * low_rank_read
    output = spec.arithmetic.output_scale * read
    if token.skip is not None:
        output = output + token.skip[row] * value
    state = state if row_decay is None else state * row_decay
    state = state + _column_of_head(token.key_columns, head, spec) * write
    if token.low_rank is not None and low_rank_read is not None:
        state = state + _column_of_head(token.low_rank.write_columns, head, spec) * low_rank_read
    return output, state
