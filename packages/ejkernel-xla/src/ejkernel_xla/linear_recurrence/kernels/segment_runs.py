"""Segments inside of chunks: each run of a segment's tokens is a pass of its own, so that none meets another's numbers.

A chunk of a few products over C tokens would multiply the tokens of two segments with weights of 0, and 0 x NaN is NaN.
Instead, a chunk is worked on once for every run that some row has in it, with the tokens of all others masked:

    row 0   a a a a a b b b        run 0: a, from the state before the chunk        run 1: b, from zeros
    row 1   c c c c c c c c        run 0: c                                         run 1: nothing

Run 0 continues the state before the chunk, later ones begin from zeros, and the last one of each row leaves the state.
Most chunks have one run, and cost what they cost without segments.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.types.forward_mode import reverse_rule
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
    """Returns the states after a chunk and its outputs [B, C, H, V]; differentiable in the states before it and its
    slices.
    """

    def run(n: jax.Array, runs: jax.Array, state: jax.Array, parts: SliceArrays) -> tuple[jax.Array, jax.Array]:
        """Returns one pass: the states after its run, and the outputs of its tokens."""
        chunk = chunk_from_slices(record, chunking, at, parts, runs == n)
        before = _state_before_run(record, state, jnp.broadcast_to(n == 0, runs.shape[:1]))
        output, after = advance(before, chunk, record.softmax_scale, precision(record))
        output = split_heads(output, num_state_heads(record))
        return (
            jnp.where(_broadcast_rows_to_states(record, _last_run(runs) == n), after, 0),
            jnp.where((runs == n)[:, :, None, None], output, 0),
        )

    return _sum_of_passes(run, segment_run_of_tokens(chunking, at), state, parts)


def _last_run(runs: jax.Array) -> jax.Array:
    """Returns the last run of every row, [B]; 0 for rows without tokens."""
    return jnp.maximum(jnp.max(runs, axis=1), 0)


def _broadcast_rows_to_states(record: LinearRecurrence, rows: jax.Array) -> jax.Array:
    """Returns an array of rows [B] repeated for every head, so that it broadcasts to states [B * H, K, V]."""
    return jnp.repeat(rows, num_state_heads(record))[:, None, None]


def _state_before_run(record: LinearRecurrence, state: jax.Array, continues: jax.Array) -> jax.Array:
    """Returns the states before a run: those before the chunk in rows [B] whose run continues, else zeros."""
    return jnp.where(_broadcast_rows_to_states(record, continues), state, 0)


@reverse_rule
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_passes(run: Any, runs: jax.Array, state: jax.Array, parts: SliceArrays) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of all passes, each of which is 0 where it has nothing."""
    return _sum_over_runs(lambda n: run(n, runs, state, parts), runs)


def _sum_over_runs(run_function: Any, runs: jax.Array) -> Any:
    """Returns the sum of a function of runs over all that some row has."""
    shapes = jax.eval_shape(run_function, jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # The results of passes are added, not replaced: each entry belongs to one pass and is 0 in the other passes. At
    # least one pass runs: it passes on the states of a chunk in which all tokens are masked.
    count = jnp.maximum(jnp.max(runs), 0) + 1
    return lax.fori_loop(jnp.int32(0), count, lambda n, total: jax.tree.map(jnp.add, total, run_function(n)), zeros)


def _sum_of_passes_forward(run: Any, runs: jax.Array, state: jax.Array, parts: SliceArrays) -> tuple[Any, Any]:
    return _sum_of_passes(run, runs, state, parts), (runs, state, parts)


def _sum_of_passes_backward(run: Any, saved: Any, cotangent: Any) -> tuple[Any, ...]:
    runs, state, parts = saved

    def pull(n: jax.Array) -> Any:
        return jax.vjp(lambda state, parts: run(n, runs, state, parts), state, parts)[1](cotangent)

    return (None, *_sum_over_runs(pull, runs))


_sum_of_passes.defvjp(_sum_of_passes_forward, _sum_of_passes_backward)
