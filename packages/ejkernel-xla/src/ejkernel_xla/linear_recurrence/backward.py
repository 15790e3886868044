"""Backward pass of a linear recurrence: the chunks once forwards for the states between them, then backwards.

Each chunk is differentiated as it stands, from the state before it, so nothing but one state a chunk is ever stored.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import TOKEN_FIELDS, LinearRecurrence, accumulator
from ejkernel.ops.pullback import Pullback
from ejkernel_xla.linear_recurrence.chunk import next_state, precision
from ejkernel_xla.linear_recurrence.forward import by_head, chunk_step, load, state_table, store
from ejkernel_xla.linear_recurrence.singles import read_singles
from ejkernel_xla.linear_recurrence.tiles import Chunk
from ejkernel_xla.linear_recurrence.walk import Walk, assemble, cut, loop, make_walk, paste, slices

Gradients = dict[str, jax.Array]


def backward(pullback: Pullback, config: Chunk) -> Gradients:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the wanted names.
        config: Tokens a chunk.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record = pullback.record
    if not record.query.size:  # no rows
        return {name: jnp.zeros_like(getattr(record, name)) for name in sorted(pullback.wanted)}
    walk = make_walk(record, config.chunk_size)
    grads = _sweep(pullback, walk, _boundaries(record, walk))
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.wanted)}


def _boundaries(record: LinearRecurrence, walk: Walk) -> jax.Array:
    """The states before every chunk, [chunks, n, K, V]."""
    table = state_table(record)
    found = jnp.zeros((walk.most, *load(record, table, walk.place(jnp.int32(0))).shape), table.dtype)

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found, table = carry
        at = walk.place(n)
        state = load(record, table, at)
        found = lax.dynamic_update_index_in_dim(found, state, n, 0)
        after = next_state(state, assemble(record, walk, at, slices(record, walk, at)), precision(record))
        return found, store(record, table, at, after)

    return loop(walk.count, step, (found, table))[0]


def _sweep(pullback: Pullback, walk: Walk, boundaries: jax.Array) -> Gradients:
    """Through the chunks in reverse; the table holds the cotangents of the states behind the chunks seen so far."""
    record, (outputs, finals) = pullback.record, pullback.cotangent
    table = finals.reshape(-1, *finals.shape[2:])
    names = [name for name in TOKEN_FIELDS if name in pullback.wanted]
    grads = {name: _zeros(getattr(record, name), record) for name in names}

    def step(n: jax.Array, carry: tuple[Gradients, jax.Array]) -> tuple[Gradients, jax.Array]:
        grads, table = carry
        n = walk.count - 1 - n
        at = walk.place(n)

        def run(state: jax.Array, parts: Gradients) -> tuple[jax.Array, jax.Array]:
            return chunk_step(record, walk, at, state, parts)

        before = lax.dynamic_index_in_dim(boundaries, n, keepdims=False)
        _, pull = jax.vjp(run, before, slices(record, walk, at))
        behind, parts = pull((load(record, table, at), cut(outputs, walk, at).astype(table.dtype)))
        grads = {name: paste(grads[name], parts[name], at) for name in names}
        return grads, store(record, table, at, behind)

    grads, table = loop(walk.count, step, (grads, table))
    if record.cu_seqlens is not None:
        grads, table = _singles(pullback, grads, table)
    first = by_head(record, table)
    return {**grads, "initial_state": first, "sequence_state": first}


def _singles(pullback: Pullback, grads: Gradients, table: jax.Array) -> tuple[Gradients, jax.Array]:
    """Gradients with those of sequences of one token, which no chunk has, and the cotangents of all first states."""
    record, fields = pullback.record, {name: getattr(pullback.record, name) for name in grads}

    def run(fields: Gradients, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return read_singles(dataclasses.replace(record, **fields), table)

    _, pull = jax.vjp(run, fields, state_table(record))
    own, table = pull((pullback.cotangent[0], table))
    return {name: x + own[name].astype(x.dtype) for name, x in grads.items()}, table


def _zeros(x: jax.Array, record: LinearRecurrence) -> jax.Array:
    """Where a gradient is collected. Only of what several tokens share it is a sum."""
    shared = x.shape[1] < record.query.shape[1]
    return jnp.zeros(x.shape, accumulator(record) if shared else x.dtype)
