"""Forward pass of a linear recurrence, chunk by chunk; between chunks only the states live on."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, head_count, states
from ejkernel_xla.linear_recurrence.chunk import advance, precision
from ejkernel_xla.linear_recurrence.singles import read_singles
from ejkernel_xla.linear_recurrence.tiles import chunk_length
from ejkernel_xla.linear_recurrence.walk import Place, Walk, assemble, loop, make_walk, paste, slices, taking_part


def forward(record: LinearRecurrence, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Output and final states of a record.

    Args:
        record: The canonical arguments.
        config: The operation's configuration; its chunk length is read.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in the accumulator's. There are no residuals: the
        backward pass finds the states between chunks again, for its own length of chunks.
    """
    walk = make_walk(record, chunk_length(config))
    start = _initial(record)

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output, table = carry
        at = walk.place(n)
        state, read = chunk_step(record, walk, at, load(table, walk, at), slices(record, walk, at))
        return paste(output, read, at), store(table, walk, at, state)

    return loop(walk.count, step, start), ()


def _initial(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
    """Outputs and states before the first chunk."""
    if record.cu_seqlens is not None:
        return read_singles(record, states(record))
    rows, tokens = record.query.shape[:2]
    shape = (rows, tokens, head_count(record), record.value.shape[3])
    return jnp.zeros(shape, record.query.dtype), states(record)


def chunk_step(
    record: LinearRecurrence, walk: Walk, at: Place, state: jax.Array, parts: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The states after a chunk and its outputs [r, C, H, V], differentiable in the states before it and its slices."""
    chunk = assemble(record, walk, at, parts)
    output, state = advance(state, chunk, record.softmax_scale, precision(record))
    output, real = jnp.moveaxis(output, 1, 2), taking_part(walk, at)
    return state, output if real is None else jnp.where(real[:, :, None, None], output, 0)


def load(table: jax.Array, walk: Walk, at: Place) -> jax.Array:
    """The states of a chunk's rows, [r, H, K, V]."""
    return table if walk.bounds is None else lax.dynamic_slice_in_dim(table, at.sequence, 1)


def store(table: jax.Array, walk: Walk, at: Place, state: jax.Array) -> jax.Array:
    """The table with the states of a chunk's rows replaced."""
    return state if walk.bounds is None else lax.dynamic_update_slice_in_dim(table, state, at.sequence, 0)
