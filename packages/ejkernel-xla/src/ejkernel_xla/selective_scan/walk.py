"""The chunks of a record: `INTERVAL` tokens each, from one state that is kept to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selective_scan import INTERVAL, SelectiveScan, accumulator
from ejkernel_xla.selective_scan.chunk import Tokens


class Place(NamedTuple):
    """One chunk.

    Attributes:
        start: First token of its slice: a last chunk that would end behind the array is moved back.
        own: Which tokens of the slice the chunk before did not have, bool [1, L, 1].
    """

    start: jax.Array
    own: jax.Array


def chunks(record: SelectiveScan) -> int:
    """How many there are."""
    return -(-record.x.shape[1] // INTERVAL)


def place(record: SelectiveScan, n: jax.Array) -> Place:
    """The nth chunk."""
    tokens = record.x.shape[1]
    length = min(INTERVAL, tokens)
    first = n * INTERVAL
    start = jnp.minimum(first, tokens - length)
    return Place(start, (start + jnp.arange(length, dtype=jnp.int32) >= first)[None, :, None])


def cut(x: jax.Array, at: Place) -> jax.Array:
    """A chunk's part of [B, T, ...]."""
    return lax.dynamic_slice_in_dim(x, at.start, at.own.shape[1], axis=1)


def paste(x: jax.Array, at: Place, part: jax.Array) -> jax.Array:
    """[B, T, ...] with the chunk's own tokens replaced."""
    merged = jnp.where(at.own, part.astype(x.dtype), cut(x, at))
    return lax.dynamic_update_slice_in_dim(x, merged, at.start, axis=1)


def load(record: SelectiveScan, at: Place) -> Tokens:
    """A chunk's tokens."""
    dtype = accumulator(record)
    step = jnp.where(at.own, cut(record.step, at), 0)
    parts = (cut(record.x, at), step, cut(record.write, at), cut(record.read, at))
    return Tokens(*(jnp.moveaxis(part, 1, 0).astype(dtype) for part in parts))
