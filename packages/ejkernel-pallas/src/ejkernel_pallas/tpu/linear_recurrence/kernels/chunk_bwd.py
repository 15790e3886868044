"""The backward kernel: gradients of a chunk from the state before it, chunks in reverse.

grid (rows, heads / heads per step, chunks)          chunks from the last to the first
states before the chunk, cotangent of the output ─► recompute the chunk, then its gradients
cotangent of the final states ─► state [heads per step, K, V] ◄─► last chunk, ... ─► gradient of the initial states
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import Heads, Tokens, advance_chunk
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import (
    GridStep,
    RecurrenceRefs,
    SegmentRuns,
    fold_segment_runs,
    grid_step_of,
    head_index,
    load_all_heads,
    load_runs,
    write_token_gradients,
)
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec

AllTokens = tuple[Tokens, ...]
Gradients = tuple[Heads, AllTokens]


def chunk_bwd(
    refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks: int, packed: bool, grad_fields: frozenset[str]
) -> None:
    """Processes one chunk of some heads."""
    grid_step = grid_step_of(refs, chunks=chunks, packed=packed, backwards=True)

    @pl.when(grid_step.is_last)
    def _() -> None:
        refs.state[...] = refs.final_state[...]

    heads, after = load_all_heads(refs, spec, jnp.float32)
    before = tuple(refs.chunk_states[head] for head in range(spec.heads_per_step))
    cotangents = tuple(
        refs.cotangent[head_index(refs.cotangent, head, spec.value_dim)].astype(jnp.float32)
        for head in range(spec.heads_per_step)
    )
    if (runs := load_runs(refs, spec, grid_step)) is None:
        state_gradients, token_gradients = _chunk_gradients(spec, before, heads, cotangents, after)
    else:
        state_gradients, token_gradients = _run_gradients(spec, grid_step, runs, before, heads, cotangents, after)
    for head, state in enumerate(state_gradients):
        refs.state[head] = state
    write_token_gradients(refs, spec, token_gradients, grad_fields)

    @pl.when(grid_step.is_first)
    def _() -> None:
        refs.initial_state[...] = refs.state[...]


def _chunk_gradients(
    spec: RecurrenceSpec, before: Heads, heads: AllTokens, cotangents: Heads, after: Heads
) -> Gradients:
    """Returns gradients of the states before a chunk and of its tokens."""
    _, pull = jax.vjp(lambda states, heads: advance_chunk(states, heads, spec.arithmetic), before, heads)
    return pull((cotangents, after))


def _run_gradients(
    spec: RecurrenceSpec,
    grid_step: GridStep,
    runs: SegmentRuns,
    before: Heads,
    heads: AllTokens,
    cotangents: Heads,
    after: Heads,
) -> Gradients:
    """Returns the same for a chunk of several runs: the first one has the states before it, and the last one those
    after.
    """

    def run(number: jax.Array, carry: Gradients) -> Gradients:
        state_gradients, totals = carry
        segment_run, is_first = runs[number], number == 0

        def chunk(states: Heads, heads: AllTokens) -> tuple[Heads, Heads]:
            states = tuple(jnp.where(is_first, x, 0.0) for x in states)
            return advance_chunk(states, tuple(segment_run.select(x) for x in heads), spec.arithmetic)

        _, pull = jax.vjp(chunk, before, heads)
        read = tuple(jnp.where(segment_run.column_mask, x, 0.0) for x in cotangents)
        left = tuple(jnp.where(segment_run.is_last, x, 0.0) for x in after)
        # Each token is in one run, so the sums over all runs have one nonzero term.
        return jax.tree.map(jnp.add, (state_gradients, totals), pull((read, left)))

    return fold_segment_runs(grid_step, run, jax.tree.map(jnp.zeros_like, (after, heads)))
