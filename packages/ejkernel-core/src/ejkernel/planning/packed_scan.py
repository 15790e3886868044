"""Packed sequences of a selective scan, as one row that every scan kernel takes.

Each sequence of the row gets tokens of ours around its own; E is the size of a channel's state:

    1 token      forgets what is before: a step so long that exp(step A) is 0, with nothing to write
    E tokens     write the initial state, one number of every channel each: x = 2^60 state, step = 2^-60
    its tokens
    E tokens     read the state behind it, one number each: step 0 changes nothing

Multiplying by powers of two rounds nothing, and exp(2^-60 A) is 1, so that states pass through exactly.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.planning import slots

SCALE = 2.0**60
FORGET = 1e30
"""A step after which nothing is left of a state whose A is below zero."""


class Layout(NamedTuple):
    """Where everything is in the row of L tokens.

    Attributes:
        sequence: [L] int32, whose token it is.
        offset: [L] int32, which of the sequence's.
        lengths: [N] int32.
        begins: [N] int32, the first token of each sequence.
    """

    sequence: jax.Array
    offset: jax.Array
    lengths: jax.Array
    begins: jax.Array


def _layout(cu_seqlens: jax.Array, tokens: int, size: int) -> Layout:
    bounds = cu_seqlens.astype(jnp.int32)
    count = bounds.shape[0] - 1
    begins = bounds[:-1] + jnp.arange(count, dtype=jnp.int32) * (1 + 2 * size)
    place = jnp.arange(tokens + count * (1 + 2 * size), dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(begins, place, side="right").astype(jnp.int32) - 1, 0, count - 1)
    return Layout(sequence, place - begins[sequence], jnp.diff(bounds), begins)


def as_row(record: Any) -> Any:
    """The row for a record of packed sequences of a selective scan, whose states may be in slots."""
    dtype, size = jnp.promote_types(record.x.dtype, jnp.float32), record.decay.shape[1]
    cu_seqlens, states = record.cu_seqlens, record.initial_state
    if states is not None and record.state_slots is not None:
        states = slots.read_slots(states, record.state_slots, cu_seqlens)
    at = _layout(cu_seqlens, record.x.shape[1], size)
    offset, behind = at.offset - 1 - size, at.offset - 1 - size - at.lengths[at.sequence]
    is_token, written = (offset >= 0) & (behind < 0), at.offset - 1
    source = jnp.clip(cu_seqlens[at.sequence] + offset, 0, record.x.shape[1] - 1)

    def tokens(x: jax.Array, otherwise: Any) -> jax.Array:
        return jnp.where(is_token[:, None], x[0, source].astype(dtype), otherwise)[None]

    numbers = jnp.arange(size, dtype=jnp.int32)
    writes, reads = ((n[:, None] == numbers).astype(dtype) for n in (written, behind))
    x = jnp.zeros((), dtype)
    if states is not None:
        states = states.astype(dtype)[at.sequence, :, jnp.clip(written, 0, size - 1)]
        x = jnp.where(((written >= 0) & (written < size))[:, None], states * SCALE, 0)
    step = jnp.where(at.offset == 0, FORGET, jnp.where((written >= 0) & (written < size), 1 / SCALE, 0))
    return dataclasses.replace(
        record,
        x=tokens(record.x, x),
        step=tokens(record.step, step.astype(dtype)[:, None]),
        write=tokens(record.write, writes),
        read=tokens(record.read, reads),
        initial_state=None,
        cu_seqlens=None,
        state_slots=None,
    )


def from_row(record: Any, output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row's output [1, L, I] as that of the record.

    Returns:
        Outputs [1, T, I] in x's dtype, 0 for tokens of no sequence, and final states [N, I, E], or the slots.
    """
    cu_seqlens, tokens, size = record.cu_seqlens, record.x.shape[1], record.decay.shape[1]
    at, index = _layout(cu_seqlens, tokens, size), jnp.arange(tokens, dtype=jnp.int32)
    bounds = cu_seqlens.astype(jnp.int32)
    owner = jnp.searchsorted(bounds[1:], index, side="right").astype(jnp.int32)
    place = index - bounds[0] + owner * (1 + 2 * size) + 1 + size
    in_sequence = ((index >= bounds[0]) & (index < bounds[-1]))[:, None]
    read = jnp.where(in_sequence, output[0, jnp.clip(place, 0, output.shape[1] - 1)], 0)
    first = at.begins + 1 + size + at.lengths
    states = output[0, first[:, None] + jnp.arange(size, dtype=jnp.int32)].swapaxes(1, 2)
    if record.state_slots is not None:
        states = slots.write_slots(record.initial_state, record.state_slots, cu_seqlens, states)
    return read[None].astype(record.x.dtype), states
