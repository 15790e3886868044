"""Backward pass of a linear recurrence.

    state passing, forwards:   S_0 -> chunk 0 -> S_1 -> chunk 1 -> S_2 ...     stores the state before every chunk
    gradients, in reverse:     ... dS_2 -> chunk 1 -> dS_1 -> chunk 0 -> dS_0  recomputes a chunk, then its VJP

Each chunk is recomputed from the state before it, so memory holds one state per chunk and nothing of its tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import TOKEN_FIELDS, LinearRecurrence, accumulator
from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel.types.pullback import Pullback
from ejkernel_xla.linear_recurrence.config import RecurrenceChunk
from ejkernel_xla.linear_recurrence.forward import chunk_step, load, split_state_heads, state_table, store
from ejkernel_xla.linear_recurrence.kernels.chunk import next_state, precision
from ejkernel_xla.linear_recurrence.kernels.chunking import (
    Chunking,
    ChunkSlice,
    add_chunk_slice,
    chunk_from_slices,
    cut,
    fill_last_chunk,
    make_chunking,
    run_loop,
    slices_of_chunk,
)
from ejkernel_xla.linear_recurrence.kernels.segment_runs import next_state_of_segments, segment_step_gradients
from ejkernel_xla.linear_recurrence.kernels.single_tokens import read_single_tokens
from ejkernel_xla.linear_recurrence.kernels.token_trees import tree_backward

Gradients = dict[str, jax.Array]


@backward_with_plain_states
def backward(pullback: Pullback, config: RecurrenceChunk) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the requested names.
        config: Tokens per chunk.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record = pullback.record
    if not record.query.size:  # no rows
        return {name: jnp.zeros_like(getattr(record, name)) for name in sorted(pullback.grad_fields)}
    if record.parents is not None:
        grads = tree_backward(pullback)
    else:
        pullback = _fill_last_chunk(pullback, config.chunk_size)
        chunking = make_chunking(pullback.record, config.chunk_size, record.query.shape[1])
        grads = _differentiate_chunks(pullback, chunking, _chunk_states(pullback.record, chunking))
        grads |= {name: grads[name][:, : getattr(record, name).shape[1]] for name in TOKEN_FIELDS if name in grads}
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _fill_last_chunk(pullback: Pullback, length: int) -> Pullback:
    """Returns the pullback of a record whose last chunk is whole, where its tokens are of a symbolic count."""
    record = fill_last_chunk(pullback.record, length)
    if record is pullback.record:
        return pullback
    outputs, finals = pullback.cotangent
    outputs = pad_axis(outputs, 1, record.query.shape[1] - outputs.shape[1])
    return dataclasses.replace(pullback, record=record, output=None, cotangent=(outputs, finals))


def _chunk_states(record: LinearRecurrence, chunking: Chunking) -> jax.Array:
    """Returns the states before every chunk, [chunks, n, K, V]."""
    table = state_table(record)
    states = jnp.zeros((chunking.max_chunks, *load(record, table, chunking.chunk_at(jnp.int32(0))).shape), table.dtype)

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, table = carry
        at = chunking.chunk_at(n)
        state = load(record, table, at)
        states = lax.dynamic_update_index_in_dim(states, state, n, 0)
        parts = slices_of_chunk(record, chunking, at)
        if chunking.real_and_start_tokens is not None:
            after = next_state_of_segments(record, chunking, at, state, parts)
        else:
            after = next_state(state, chunk_from_slices(record, chunking, at, parts), precision(record))
        return states, store(record, table, at, after)

    return run_loop(chunking.count, step, (states, table))[0]


def _differentiate_chunks(pullback: Pullback, chunking: Chunking, chunk_states: jax.Array) -> Gradients:
    """Differentiates the chunks in reverse; the table holds the cotangents of the states after the current chunk."""
    record, (outputs, finals) = pullback.record, pullback.cotangent
    table = finals.reshape(-1, *finals.shape[2:])
    names = [name for name in TOKEN_FIELDS if name in pullback.grad_fields]
    grads = {name: _zero_gradient(getattr(record, name), record) for name in names}

    def step(n: jax.Array, carry: tuple[Gradients, jax.Array]) -> tuple[Gradients, jax.Array]:
        grads, table = carry
        n = chunking.count - 1 - n
        at = chunking.chunk_at(n)

        before = lax.dynamic_index_in_dim(chunk_states, n, keepdims=False)
        cotangent = load(record, table, at), cut(outputs, chunking, at).astype(table.dtype)
        dstate, parts = _chunk_gradients(record, chunking, at, before, cotangent)
        # Added: tokens that a chunk only shares have gradients of 0 in it.
        grads = {name: add_chunk_slice(grads[name], parts[name], at) for name in names}
        return grads, store(record, table, at, dstate)

    grads, table = run_loop(chunking.count, step, (grads, table))
    if record.cu_seqlens is not None:
        # After the loop: the table then holds the cotangents of the states that these tokens leave.
        grads, table = _single_token_gradients(pullback, grads, table)
    first = split_state_heads(record, table)
    return {**grads, "initial_state": first, "sequence_state": first}


def _chunk_gradients(
    record: LinearRecurrence,
    chunking: Chunking,
    at: ChunkSlice,
    before: jax.Array,
    cotangent: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, Gradients]:
    """Returns the gradients of the states before a chunk and of its slices.

    The VJP is taken inside of the loop over chunks, so the residuals of a chunk are dropped before the next chunk. The
    VJP of the whole loop would keep the residuals of all chunks.
    """
    parts = slices_of_chunk(record, chunking, at)
    if chunking.real_and_start_tokens is not None:
        return segment_step_gradients(record, chunking, at, before, parts, cotangent)
    return jax.vjp(functools.partial(chunk_step, record, chunking, at), before, parts)[1](cotangent)


def _single_token_gradients(pullback: Pullback, grads: Gradients, table: jax.Array) -> tuple[Gradients, jax.Array]:
    """Returns gradients with those of sequences of one token, which no chunk has, and the cotangents of all first
    states.
    """
    record, fields = pullback.record, {name: getattr(pullback.record, name) for name in grads}

    def run(fields: Gradients, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return read_single_tokens(dataclasses.replace(record, **fields), table)

    _, pull = jax.vjp(run, fields, state_table(record))
    token_gradients, table = pull((pullback.cotangent[0], table))
    return {name: x + token_gradients[name].astype(x.dtype) for name, x in grads.items()}, table


def _zero_gradient(x: jax.Array, record: LinearRecurrence) -> jax.Array:
    """Returns zeros for a gradient; in the accumulator's dtype where tokens share the field, since it is a sum then."""
    shared = x.shape[1] != record.query.shape[1]
    return jnp.zeros(x.shape, accumulator(record) if shared else x.dtype)
