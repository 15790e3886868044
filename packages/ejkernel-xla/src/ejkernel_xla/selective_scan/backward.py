"""Backward pass of a selective scan: the chunks in reverse, each computed again from the state before it.

    forward    s0 -> chunk 0 -> s1 -> chunk 1 -> s2       the states between chunks are residuals
    backward   ds0 <- chunk 0 <- ds1 <- chunk 1 <- ds2

Memory holds the states of one chunk's tokens at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selective_scan import SelectiveScan, accumulator
from ejkernel.families.selective_scan.scan_sequences import backward_with_slot_states
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel.types.pullback import Pullback
from ejkernel_xla.selective_scan.config import ScanSteps
from ejkernel_xla.selective_scan.kernels.chunk import chunk_cotangents
from ejkernel_xla.selective_scan.plan import (
    TOKEN_FIELDS,
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

Gradients = dict[str, jax.Array]


@backward_with_slot_states
def backward(pullback: Pullback, config: ScanSteps) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, states between chunks, cotangents of output and final states, and the requested names.
        config: How the tokens of a chunk are combined.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, dtype, final = fill_last_chunk(pullback.record), accumulator(pullback.record), pullback.cotangent[1]
    outputs = pad_axis(pullback.cotangent[0], 1, record.x.shape[1] - pullback.record.x.shape[1])
    decay, skip = record.decay.T.astype(dtype), record.skip.astype(dtype)

    after, packed = jnp.swapaxes(final, 1, 2).astype(dtype), intervals(record)

    def chunk(n: jax.Array, carry: tuple[Gradients, Gradients, jax.Array, jax.Array]) -> tuple[Any, ...]:
        grads, sums, dstate, first = carry
        n = num_chunks(record) - 1 - n
        at = chunk_at(record, packed, n)
        dstate = state_before_chunk(at._replace(starts_sequence=at.ends_sequence), dstate, after)
        # Tokens of other chunks are 0 here, and the state passes them unchanged; their own chunks compute their
        # gradients.
        x, cotangent = cut(record.x, at).astype(dtype), cut(outputs, at).astype(dtype)
        before = lax.dynamic_index_in_dim(pullback.residuals.states, n, axis=1, keepdims=False)
        cotangents = (dstate, jnp.moveaxis(cotangent, 1, 0))
        before, token_gradients, ddecay = chunk_cotangents(
            config.associative, before, load(record, at), decay, cotangents
        )
        parts = {name: jnp.moveaxis(part, 0, 1) for name, part in token_gradients._asdict().items()}
        # The skip does not pass through the state.
        parts["x"] = parts["x"] + skip * cotangent
        if at.sequence is not None:  # an interval of no sequence still has the last one's cotangent after it
            ddecay = jnp.where(at.sequence < after.shape[0], ddecay, 0)
        sums = {"decay": sums["decay"] + ddecay, "skip": sums["skip"] + jnp.sum(x * cotangent, axis=(0, 1))}
        return (
            {name: store_chunk_tokens(grads[name], at, parts[name]) for name in grads},
            sums,
            before,
            store_final_states(at, before, first),
        )

    grads = {name: jnp.zeros_like(getattr(record, name)) for name in TOKEN_FIELDS if name in pullback.grad_fields}
    sums = {"decay": jnp.zeros_like(decay), "skip": jnp.zeros_like(skip)}
    start = (grads, sums, after if packed is None else jnp.zeros_like(after[:1]), after)
    grads, sums, _, state = lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks(record)), chunk, start)
    gradients = {**grads, "decay": sums["decay"].T, "skip": sums["skip"], "initial_state": jnp.swapaxes(state, 1, 2)}
    return {name: _as_field(pullback.record, name, gradients[name]) for name in sorted(pullback.grad_fields)}


def _as_field(record: SelectiveScan, name: str, gradient: jax.Array) -> jax.Array:
    """Returns a gradient in its field's dtype, without what fills up the last chunk."""
    field = getattr(record, name)
    return (gradient[:, : field.shape[1]] if name in TOKEN_FIELDS else gradient).astype(field.dtype)
