"""Forward pass of a selective scan, chunk by chunk."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selective_scan import FAMILY, ScanResiduals, SelectiveScan, accumulator, first_state
from ejkernel.families.selective_scan.scan_sequences import forward_with_slot_states
from ejkernel.planning.fixed_tiles import fixed_loop
from ejkernel_xla.fixed_tiles import forward_in_tiles
from ejkernel_xla.selective_scan.config import ScanSteps
from ejkernel_xla.selective_scan.kernels.chunk import advance, advance_token_by_token
from ejkernel_xla.selective_scan.plan import (
    chunk_at,
    cut,
    fill_last_chunk,
    intervals,
    load,
    num_chunks,
    state_before_chunk,
    store_chunk_tokens,
    store_final_states,
)


@forward_with_slot_states
def forward(record: SelectiveScan, config: ScanSteps) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: How the tokens of a chunk are combined.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E], or [N, I, E] of packed sequences, in the accumulator's,
        and the states between chunks.
    """
    if config.batch_invariant and record.cu_seqlens is None:
        return forward_in_tiles(lambda row: _forward(row, config), record, FAMILY.axes_of(record), "b", block=1)
    (output, final), residuals = _forward(fill_last_chunk(record), config)
    return (output[:, : record.x.shape[1]], final), residuals


def _forward(record: SelectiveScan, config: ScanSteps) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    dtype = accumulator(record)
    decay, skip, first = record.decay.T.astype(dtype), record.skip.astype(dtype), first_state(record)
    packed, rows = intervals(record), record.x.shape[0]
    chunk_states = jnp.zeros((rows, num_chunks(record), *first.shape[1:]), dtype)

    def chunk(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        output, chunk_states, state, final = carry
        at = chunk_at(record, packed, n)
        state = state_before_chunk(at, state, first)
        # The residuals are one state every INTERVAL tokens, instead of one per token.
        stored = state if at.sequence is None else jnp.where(at.sequence < first.shape[0], state, 0)
        chunk_states = lax.dynamic_update_index_in_dim(chunk_states, stored, n, axis=1)
        if config.batch_invariant:
            state, read = advance_token_by_token(state, load(record, at), decay, skip)
            part = jnp.moveaxis(read, 0, 1)
        else:
            state, read = advance(config.associative, state, load(record, at), decay)
            part = jnp.moveaxis(read, 0, 1) + skip * cut(record.x, at).astype(dtype)
        return store_chunk_tokens(output, at, part), chunk_states, state, store_final_states(at, state, final)

    # The state after a sequence without tokens is the state before it.
    start = (jnp.zeros_like(record.x), chunk_states, first if packed is None else jnp.zeros_like(first[:1]), first)
    output, chunk_states, _, final = (
        fixed_loop(num_chunks(record), chunk, start)
        if config.batch_invariant
        else lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks(record)), chunk, start)
    )
    return (output, jnp.swapaxes(final, 1, 2)), ScanResiduals(states=chunk_states)
