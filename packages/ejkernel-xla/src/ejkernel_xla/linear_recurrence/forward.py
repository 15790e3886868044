"""Forward pass of a linear recurrence, chunk by chunk; between chunks only the states live on.

    S_0 -> chunk 0: outputs -> S_1 -> chunk 1: outputs -> S_2 -> ...      rows and heads at the same time

A chunk is a few matrix products over C tokens, and a score matrix [C, C]; memory does not depend on the length.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import (
    TOKEN_FIELDS,
    LinearRecurrence,
    axes,
    num_state_heads,
    states,
)
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel.planning.fixed_tiles import MIN_STEPS, fixed_loop, pad_axis
from ejkernel_xla.fixed_tiles import forward_in_tiles
from ejkernel_xla.linear_recurrence.config import RecurrenceChunk
from ejkernel_xla.linear_recurrence.kernels.chunk import advance, precision
from ejkernel_xla.linear_recurrence.kernels.chunking import (
    Chunking,
    ChunkSlice,
    add_chunk_slice,
    chunk_from_slices,
    fill_last_chunk,
    make_chunking,
    replace_chunk_slice,
    run_loop,
    slices_of_chunk,
    split_heads,
    valid_tokens,
)
from ejkernel_xla.linear_recurrence.kernels.segment_runs import segment_step
from ejkernel_xla.linear_recurrence.kernels.single_tokens import read_single_tokens
from ejkernel_xla.linear_recurrence.kernels.token_trees import tree_forward


@forward_with_plain_states
def forward(record: LinearRecurrence, config: RecurrenceChunk) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Tokens per chunk.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in the accumulator's. There are no residuals: the
        backward pass finds the states between chunks again, for its own length of chunks.
    """
    if record.parents is not None:
        output, token_states = tree_forward(record)
        return (output, token_states if record.keeps_token_states else states(record)), ()
    if not record.query.size:  # no rows
        return (_zero_outputs(record), states(record)), ()
    if config.batch_invariant:
        return forward_in_tiles(
            lambda row: _forward_of_rows(row, config), record, axes(record), "b", block=config.tile_rows
        ), ()
    tokens, record = record.query.shape[1], fill_last_chunk(record, config.chunk_size)
    chunking = make_chunking(record, config.chunk_size, tokens)
    output, table = run_loop(chunking.count, _chunk_step(record, chunking), _initial_outputs_and_states(record))
    return (output[:, :tokens], split_state_heads(record, table)), ()


def _forward_of_rows(record: LinearRecurrence, config: RecurrenceChunk) -> tuple[jax.Array, jax.Array]:
    """Returns output and final states of a tile, by the same program for each token of any number of them."""
    tokens = record.query.shape[1]
    record = _with_room_for_loop(record)
    start = _initial_outputs_and_states(record)
    output, table = fixed_loop(tokens, _chunk_step(record, make_chunking(record, config.chunk_size)), start)
    return output[:, :tokens], split_state_heads(record, table)


def _with_room_for_loop(record: LinearRecurrence) -> LinearRecurrence:
    """Returns the record with `MIN_STEPS` tokens at least; a `fixed_loop` does not read those added."""
    missing = MIN_STEPS - record.query.shape[1]
    if missing <= 0:
        return record
    arrays = {name: getattr(record, name) for name in TOKEN_FIELDS if name != "skip"}
    return dataclasses.replace(record, **{name: pad_axis(x, 1, missing) for name, x in arrays.items() if x is not None})


def _chunk_step(record: LinearRecurrence, chunking: Chunking) -> Callable[[jax.Array, Any], Any]:
    """Returns the body of the loop over chunks."""
    # Chunks that share tokens add their outputs, since each chunk has 0 for the tokens of the other chunk.
    write = replace_chunk_slice if chunking.has_no_masked_token else add_chunk_slice

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output, table = carry
        at = chunking.chunk_at(n)
        state, read = chunk_step(record, chunking, at, load(record, table, at), slices_of_chunk(record, chunking, at))
        return write(output, read, at), store(record, table, at, state)

    # This is a loop and not a vmap over chunks: states are sequential, and memory holds the scores of one chunk only.
    return step


def _initial_outputs_and_states(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and states before the first chunk."""
    if record.cu_seqlens is not None:
        return read_single_tokens(record, state_table(record))
    return _zero_outputs(record), state_table(record)


def _zero_outputs(record: LinearRecurrence) -> jax.Array:
    rows, tokens = record.query.shape[:2]
    return jnp.zeros((rows, tokens, num_state_heads(record), record.value.shape[3]), record.query.dtype)


def state_table(record: LinearRecurrence) -> jax.Array:
    """Returns the states before the first tokens, those of all rows or packed sequences together: [n, K, V]."""
    return states(record).reshape(-1, record.query.shape[3], record.value.shape[3])


def split_state_heads(record: LinearRecurrence, table: jax.Array) -> jax.Array:
    """Returns [n, K, V] as the record's [rows or sequences, H, K, V]."""
    return table.reshape(-1, num_state_heads(record), *table.shape[1:])


def chunk_step(
    record: LinearRecurrence, chunking: Chunking, at: ChunkSlice, state: jax.Array, parts: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the states after a chunk and its outputs [r, C, H, V].

    It is differentiable in the states before the chunk and its slices: with segments in forward mode alone.
    """
    if chunking.real_and_start_tokens is not None:
        return segment_step(record, chunking, at, state, parts)
    chunk = chunk_from_slices(record, chunking, at, parts)
    output, state = advance(state, chunk, record.softmax_scale, precision(record))
    output, valid = split_heads(output, num_state_heads(record)), valid_tokens(chunking, at)
    return state, output if valid is None else jnp.where(valid[:, :, None, None], output, 0)


def load(record: LinearRecurrence, table: jax.Array, at: ChunkSlice) -> jax.Array:
    """Returns the states of a chunk's rows, [n, K, V]."""
    if record.cu_seqlens is None:
        return table
    return lax.dynamic_slice_in_dim(table, at.sequence * num_state_heads(record), num_state_heads(record))


def store(record: LinearRecurrence, table: jax.Array, at: ChunkSlice, state: jax.Array) -> jax.Array:
    """Returns the table with the states of a chunk's rows replaced."""
    if record.cu_seqlens is None:
        return state
    return lax.dynamic_update_slice_in_dim(table, state, at.sequence * num_state_heads(record), 0)
