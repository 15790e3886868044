"""Segments inside of chunks: each run of a segment's tokens is a pass of its own, so that none meets another's numbers.

A chunk of a few products over C tokens would multiply the tokens of two segments with weights of 0, and 0 x NaN is NaN.
Instead, a chunk is worked on once for every run that some row has in it, with the tokens of all others masked:

    row 0   a a a a a b b b        run 0: a, from the state before the chunk        run 1: b, from zeros
    row 1   c c c c c c c c        run 0: c                                         run 1: nothing

Run 0 continues the state before the chunk, later ones begin from zeros, and the last one of each row leaves the state.
Most chunks have one run, and cost what they cost without segments.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel_xla.linear_recurrence.kernels.chunk import advance, next_state, precision
from ejkernel_xla.linear_recurrence.kernels.chunking import (
    Chunking,
    ChunkSlice,
    chunk_from_slices,
    cut,
    split_heads,
    valid_tokens,
)

SliceArrays = dict[str, jax.Array]


def segment_run_of_tokens(chunking: Chunking, at: ChunkSlice) -> jax.Array:
    """Returns the run of every token of a chunk, int32 [B, C]; -1 for masked tokens."""
    assert chunking.real_and_start_tokens is not None  # the callers looked
    valid = valid_tokens(chunking, at)
    assert valid is not None
    starts = cut(chunking.real_and_start_tokens[1], chunking, at) & valid
    return jnp.where(valid, jnp.cumsum(starts, axis=1, dtype=jnp.int32), -1)


def next_state_of_segments(
    record: LinearRecurrence, chunking: Chunking, at: ChunkSlice, state: jax.Array, parts: SliceArrays
) -> jax.Array:
    """Returns the states after a chunk alone: those of each row's last run."""
    runs = segment_run_of_tokens(chunking, at)
    last = _last_run(runs)
    chunk = chunk_from_slices(record, chunking, at, parts, runs == last[:, None])
    return next_state(_state_before_run(record, state, last == 0), chunk, precision(record))


def segment_step(
    record: LinearRecurrence, chunking: Chunking, at: ChunkSlice, state: jax.Array, parts: SliceArrays
) -> tuple[jax.Array, jax.Array]:
    """Returns the states after a chunk and its outputs [B, C, H, V]; `segment_step_gradients` differentiates it."""
    runs = segment_run_of_tokens(chunking, at)
    return _sum_over_runs(_function_of_runs(record, chunking, at, runs), runs, state, parts)


def segment_step_gradients(
    record: LinearRecurrence,
    chunking: Chunking,
    at: ChunkSlice,
    state: jax.Array,
    parts: SliceArrays,
    cotangent: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, SliceArrays]:
    """Returns the gradients of the states before a chunk and of its slices, from those of what `segment_step` returns.

    Each pass has its own VJP inside of the loop over runs: JAX has no reverse mode of a loop whose count is traced, but
    it does have forward mode, of this loop too.
    """
    runs = segment_run_of_tokens(chunking, at)
    run = _function_of_runs(record, chunking, at, runs)

    def pull(n: jax.Array, state: jax.Array, parts: SliceArrays) -> tuple[jax.Array, SliceArrays]:
        return jax.vjp(functools.partial(run, n), state, parts)[1](cotangent)

    return _sum_over_runs(pull, runs, state, parts)


def _function_of_runs(
    record: LinearRecurrence, chunking: Chunking, at: ChunkSlice, runs: jax.Array
) -> Callable[[jax.Array, jax.Array, SliceArrays], tuple[jax.Array, jax.Array]]:
    """Returns the function (run, states before the chunk, slices) -> the states after the run, and the outputs of its
    tokens; both are 0 for what the run does not have.
    """

    def run(n: jax.Array, state: jax.Array, parts: SliceArrays) -> tuple[jax.Array, jax.Array]:
        chunk = chunk_from_slices(record, chunking, at, parts, runs == n)
        before = _state_before_run(record, state, jnp.broadcast_to(n == 0, runs.shape[:1]))
        output, after = advance(before, chunk, record.softmax_scale, precision(record))
        output = split_heads(output, num_state_heads(record))
        return (
            jnp.where(_broadcast_rows_to_states(record, _last_run(runs) == n), after, 0),
            jnp.where((runs == n)[:, :, None, None], output, 0),
        )

    return run


def _last_run(runs: jax.Array) -> jax.Array:
    """Returns the last run of every row, [B]; 0 for rows without tokens."""
    return jnp.maximum(jnp.max(runs, axis=1), 0)


def _broadcast_rows_to_states(record: LinearRecurrence, rows: jax.Array) -> jax.Array:
    """Returns an array of rows [B] repeated for every head, so that it broadcasts to states [B * H, K, V]."""
    return jnp.repeat(rows, num_state_heads(record))[:, None, None]


def _state_before_run(record: LinearRecurrence, state: jax.Array, continues: jax.Array) -> jax.Array:
    """Returns the states before a run: those before the chunk in rows [B] whose run continues, else zeros."""
    return jnp.where(_broadcast_rows_to_states(record, continues), state, 0)


def _sum_over_runs(run: Any, runs: jax.Array, state: jax.Array, parts: SliceArrays) -> Any:
    """Returns the sum of a function (run, states, slices) over all runs that some row has."""
    shapes = jax.eval_shape(run, jnp.int32(0), state, parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # The results of passes are added, not replaced: each entry belongs to one pass and is 0 in the other passes. At
    # least one pass runs: it passes on the states of a chunk in which all tokens are masked.
    count = jnp.maximum(jnp.max(runs), 0) + 1
    return lax.fori_loop(
        jnp.int32(0), count, lambda n, total: jax.tree.map(jnp.add, total, run(n, state, parts)), zeros
    )
