"""The forward kernel: outputs and states, chunk by chunk.

grid (rows, heads / heads per step, chunks)          chunks in order, states stay in VMEM
HBM  query, key, value, gates [C, heads per step] ─ double buffer ─► VMEM ─► registers
     initial states, maybe slots ─► state [heads per step, K, V] in VMEM ◄─► chunk 0, chunk 1, ... ─► final states
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import Heads, advance, next_states
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import (
    RecurrenceRefs,
    Step,
    fold_segment_runs,
    load_all,
    load_runs,
    part,
    step_of,
)
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec


def chunk_fwd(refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks: int, packed: bool, in_slots: bool = False) -> None:
    """Processes one chunk of some heads."""
    step = step_of(refs, chunks=chunks, packed=packed, in_slots=in_slots)
    pl.when(step.is_first)(lambda: _load_state(refs, step))
    if step.keeps is not None:
        # The first chunk's block of the final states goes back to a slot even where no step writes it.
        @pl.when((pl.program_id(2) == 0) & ~step.keeps)
        def _() -> None:
            refs.final[...] = refs.initial[...]

    heads, states = load_all(refs, spec)
    runs = load_runs(refs, spec, step)
    if runs is None:
        reads, states = advance(states, heads, spec.numbers)
    else:

        def run(number: jax.Array, carry: tuple[Heads, Heads]) -> tuple[Heads, Heads]:
            totals, states = carry
            segment_run = runs[number]
            before = tuple(jnp.where(number == 0, state, 0.0) for state in states)
            reads, after = advance(before, tuple(segment_run.select(x) for x in heads), spec.numbers)
            return tuple(jnp.where(segment_run.column, x, y) for x, y in zip(reads, totals, strict=True)), after

        zeros = jnp.zeros((spec.chunk, spec.values), jnp.float32)
        reads, states = fold_segment_runs(step, run, ((zeros,) * spec.heads, states))
    for head in range(spec.heads):
        refs.state[head] = states[head]
        refs.output[part(refs.output, head, spec.values)] = reads[head].astype(refs.output.dtype)

    @pl.when(step.is_last if step.keeps is None else step.is_last & step.keeps)
    def _() -> None:
        refs.final[...] = refs.state[...].astype(refs.final.dtype)


def _load_state(refs: RecurrenceRefs, step: Step) -> None:
    """Loads the states before the first chunk of a sequence; zeros of one without a slot."""
    initial = refs.initial[...].astype(jnp.float32)
    refs.state[...] = initial if step.keeps is None else jnp.where(step.keeps, initial, 0.0)


def chunk_states(refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks: int, packed: bool) -> None:
    """Computes the states before one chunk of some heads, which the backward kernel reads."""
    step = step_of(refs, chunks=chunks, packed=packed)

    @pl.when(step.is_first)
    def _() -> None:
        refs.state[...] = refs.initial[...]

    refs.chunk_states[...] = refs.state[...]
    heads, states = load_all(refs, spec)
    runs = load_runs(refs, spec, step)
    if runs is not None:
        # Only the last run of the chunk determines the state after it.
        last = step.runs - 1
        heads = tuple(runs[last].select(x) for x in heads)
        states = tuple(jnp.where(last == 0, state, 0.0) for state in states)
    for head, state in enumerate(next_states(states, heads, spec.numbers)):
        refs.state[head] = state
