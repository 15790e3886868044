"""The forward kernel: outputs and states, chunk by chunk.

grid (rows, heads / heads per step, chunks)          chunks in order, states stay in VMEM
HBM  query, key, value, gates [C, heads per step] ─ double buffer ─► VMEM ─► registers
     initial states, maybe slots ─► state [heads per step, K, V] in VMEM ◄─► chunk 0, chunk 1, ... ─► final states
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import ArraysPerHead, advance_chunk, states_after_chunk
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import (
    GridStep,
    RecurrenceRefs,
    fold_segment_runs,
    grid_step_of,
    head_index,
    load_segment_runs,
    load_tokens_and_states,
)
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec


def chunk_fwd(
    refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks_per_row: int, is_packed: bool, states_in_slots: bool = False
) -> None:
    """Processes one chunk of some heads."""
    grid_step = grid_step_of(refs, chunks_per_row=chunks_per_row, is_packed=is_packed, states_in_slots=states_in_slots)
    pl.when(grid_step.is_first)(lambda: _load_initial_states(refs, grid_step))
    if grid_step.has_slot is not None:
        # The first chunk's block of the final states goes back to a slot even where no step writes it.
        @pl.when((pl.program_id(2) == 0) & ~grid_step.has_slot)
        def _() -> None:
            refs.final_state[...] = refs.initial_state[...]

    heads, states = load_tokens_and_states(refs, spec)
    runs = load_segment_runs(refs, spec, grid_step)
    if runs is None:
        reads, states = advance_chunk(states, heads, spec.arithmetic)
    else:

        def advance_run(
            run_index: jax.Array, carry: tuple[ArraysPerHead, ArraysPerHead]
        ) -> tuple[ArraysPerHead, ArraysPerHead]:
            totals, states = carry
            segment_run = runs[run_index]
            before = tuple(jnp.where(run_index == 0, state, 0.0) for state in states)
            reads, after = advance_chunk(before, tuple(segment_run.select_tokens(x) for x in heads), spec.arithmetic)
            return tuple(jnp.where(segment_run.column_mask, x, y) for x, y in zip(reads, totals, strict=True)), after

        zeros = jnp.zeros((spec.chunk_tokens, spec.value_dim), jnp.float32)
        reads, states = fold_segment_runs(grid_step, advance_run, ((zeros,) * spec.heads_per_step, states))
    for head in range(spec.heads_per_step):
        refs.state[head] = states[head]
        refs.output[head_index(refs.output, head, spec.value_dim)] = reads[head].astype(refs.output.dtype)

    @pl.when(grid_step.is_last if grid_step.has_slot is None else grid_step.is_last & grid_step.has_slot)
    def _() -> None:
        refs.final_state[...] = refs.state[...].astype(refs.final_state.dtype)


def _load_initial_states(refs: RecurrenceRefs, grid_step: GridStep) -> None:
    """Loads the states before the first chunk of a sequence; zeros of one without a slot."""
    initial = refs.initial_state[...].astype(jnp.float32)
    refs.state[...] = initial if grid_step.has_slot is None else jnp.where(grid_step.has_slot, initial, 0.0)


def store_chunk_states(refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks_per_row: int, is_packed: bool) -> None:
    """Computes the states before one chunk of some heads, which the backward kernel reads."""
    grid_step = grid_step_of(refs, chunks_per_row=chunks_per_row, is_packed=is_packed)

    @pl.when(grid_step.is_first)
    def _() -> None:
        refs.state[...] = refs.initial_state[...]

    refs.chunk_states[...] = refs.state[...]
    heads, states = load_tokens_and_states(refs, spec)
    runs = load_segment_runs(refs, spec, grid_step)
    if runs is not None:
        # Only the last run of the chunk determines the state after it.
        last = grid_step.num_runs - 1
        heads = tuple(runs[last].select_tokens(x) for x in heads)
        states = tuple(jnp.where(last == 0, state, 0.0) for state in states)
    for head, state in enumerate(states_after_chunk(states, heads, spec.arithmetic)):
        refs.state[head] = state
