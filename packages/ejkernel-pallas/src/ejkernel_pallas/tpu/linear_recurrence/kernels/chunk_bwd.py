"""The backward kernel: gradients of a chunk from the state before it, chunks in reverse.

grid (rows, heads / heads per step, chunks)          chunks from the last to the first
states before the chunk, cotangent of the output ─► recompute the chunk, then its gradients
cotangent of the final states ─► state [heads per step, K, V] ◄─► last chunk, ... ─► gradient of the initial states
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import ArraysPerHead, ChunkTokens, advance_chunk
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import (
    GridStep,
    RecurrenceRefs,
    SegmentRuns,
    fold_segment_runs,
    grid_step_of,
    head_index,
    load_segment_runs,
    load_tokens_and_states,
    write_token_gradients,
)
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec

TokensPerHead = tuple[ChunkTokens, ...]
Gradients = tuple[ArraysPerHead, TokensPerHead]


def chunk_bwd(
    refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks_per_row: int, is_packed: bool, grad_fields: frozenset[str]
) -> None:
    """Processes one chunk of some heads."""
    grid_step = grid_step_of(refs, chunks_per_row=chunks_per_row, is_packed=is_packed, reverses_chunks=True)

    @pl.when(grid_step.is_last)
    def _() -> None:
        refs.state[...] = refs.final_state[...]

    heads, after = load_tokens_and_states(refs, spec, jnp.float32)
    before = tuple(refs.chunk_states[head] for head in range(spec.heads_per_step))
    cotangents = tuple(
        refs.cotangent[head_index(refs.cotangent, head, spec.value_dim)].astype(jnp.float32)
        for head in range(spec.heads_per_step)
    )
    if (runs := load_segment_runs(refs, spec, grid_step)) is None:
        state_gradients, token_gradients = _chunk_gradients(spec, before, heads, cotangents, after)
    else:
        state_gradients, token_gradients = _segmented_chunk_gradients(
            spec, grid_step, runs, before, heads, cotangents, after
        )
    for head, state in enumerate(state_gradients):
        refs.state[head] = state
    write_token_gradients(refs, spec, token_gradients, grad_fields)

    @pl.when(grid_step.is_first)
    def _() -> None:
        refs.initial_state[...] = refs.state[...]


def _chunk_gradients(
    spec: RecurrenceSpec,
    initial_states: ArraysPerHead,
    heads: TokensPerHead,
    cotangents: ArraysPerHead,
    state_cotangents: ArraysPerHead,
) -> Gradients:
    """Returns gradients of the states before a chunk and of its tokens."""
    _, pull = jax.vjp(lambda states, heads: advance_chunk(states, heads, spec.arithmetic), initial_states, heads)
    return pull((cotangents, state_cotangents))


def _segmented_chunk_gradients(
    spec: RecurrenceSpec,
    grid_step: GridStep,
    segment_runs: SegmentRuns,
    initial_states: ArraysPerHead,
    heads: TokensPerHead,
    cotangents: ArraysPerHead,
    state_cotangents: ArraysPerHead,
) -> Gradients:
    """Returns the same for a chunk with several runs of tokens of one segment. Only the first run reads the states
    before the chunk, and only the last run leaves states after it.
    """

    def add_run_gradients(run_index: jax.Array, carry: Gradients) -> Gradients:
        state_gradients, totals = carry
        segment_run, is_first = segment_runs[run_index], run_index == 0

        def advance_run(
            initial_states_of_run: ArraysPerHead, heads: TokensPerHead
        ) -> tuple[ArraysPerHead, ArraysPerHead]:
            initial_states_of_run = tuple(jnp.where(is_first, x, 0.0) for x in initial_states_of_run)
            return advance_chunk(
                initial_states_of_run, tuple(segment_run.select_tokens(x) for x in heads), spec.arithmetic
            )

        _, pull = jax.vjp(advance_run, initial_states, heads)
        read = tuple(jnp.where(segment_run.column_mask, x, 0.0) for x in cotangents)
        left = tuple(jnp.where(segment_run.is_last, x, 0.0) for x in state_cotangents)
        # Each token is in one run, so the sums over all runs have one nonzero term.
        return jax.tree.map(jnp.add, (state_gradients, totals), pull((read, left)))

    return fold_segment_runs(grid_step, add_run_gradients, jax.tree.map(jnp.zeros_like, (state_cotangents, heads)))
