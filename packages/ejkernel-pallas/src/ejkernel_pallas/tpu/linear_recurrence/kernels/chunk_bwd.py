"""The backward kernel: gradients of a chunk from the state before it, chunks in reverse.

grid (rows, heads / heads per step, chunks)          chunks from the last to the first
states before the chunk, cotangent of the output ─► recompute the chunk, then its gradients
cotangent of the final states ─► state [heads per step, K, V] ◄─► last chunk, ... ─► gradient of the initial states
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import Heads, Tokens, advance
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import (
    RecurrenceRefs,
    Runs,
    Step,
    add_heads,
    fold_segment_runs,
    load_all,
    load_runs,
    part,
    step_of,
)
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec

AllTokens = tuple[Tokens, ...]
Gradients = tuple[Heads, AllTokens]


def chunk_bwd(
    refs: RecurrenceRefs, *, spec: RecurrenceSpec, chunks: int, packed: bool, grad_fields: frozenset[str]
) -> None:
    """Processes one chunk of some heads."""
    step = step_of(refs, chunks=chunks, packed=packed, backwards=True)

    @pl.when(step.is_last)
    def _() -> None:
        refs.state[...] = refs.final[...]

    heads, after = load_all(refs, spec, jnp.float32)
    before = tuple(refs.chunk_states[head] for head in range(spec.heads))
    cotangents = tuple(
        refs.cotangent[part(refs.cotangent, head, spec.values)].astype(jnp.float32) for head in range(spec.heads)
    )
    if (runs := load_runs(refs, spec, step)) is None:
        state_gradients, token_gradients = _chunk_gradients(spec, before, heads, cotangents, after)
    else:
        state_gradients, token_gradients = _run_gradients(spec, step, runs, before, heads, cotangents, after)
    for head, state in enumerate(state_gradients):
        refs.state[head] = state
    add_heads(refs, spec, token_gradients, grad_fields)

    @pl.when(step.is_first)
    def _() -> None:
        refs.initial[...] = refs.state[...]


def _chunk_gradients(
    spec: RecurrenceSpec, before: Heads, heads: AllTokens, cotangents: Heads, after: Heads
) -> Gradients:
    """Returns gradients of the states before a chunk and of its tokens."""
    _, pull = jax.vjp(lambda states, heads: advance(states, heads, spec.numbers), before, heads)
    return pull((cotangents, after))


def _run_gradients(
    spec: RecurrenceSpec,
    step: Step,
    runs: Runs,
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
            return advance(states, tuple(segment_run.select(x) for x in heads), spec.numbers)

        _, pull = jax.vjp(chunk, before, heads)
        read = tuple(jnp.where(segment_run.column, x, 0.0) for x in cotangents)
        left = tuple(jnp.where(segment_run.is_last, x, 0.0) for x in after)
        # Each token is in one run, so the sums over all runs have one nonzero term.
        return jax.tree.map(jnp.add, (state_gradients, totals), pull((read, left)))

    return fold_segment_runs(step, run, jax.tree.map(jnp.zeros_like, (after, heads)))
