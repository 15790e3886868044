"""The chunks of a record: `INTERVAL` tokens each, from one stored state to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selective_scan import INTERVAL, SelectiveScan, accumulator
from ejkernel_xla.selective_scan.chunk import Tokens


class ChunkSlice(NamedTuple):
    """One chunk.

    Attributes:
        start: First token of its slice: a last chunk that would end behind the array is moved back.
        fresh: Which tokens of the slice the chunk before did not have, bool [1, L, 1].
    """

    start: jax.Array
    fresh: jax.Array


def chunks(record: SelectiveScan) -> int:
    """Number of chunks."""
    return -(-record.x.shape[1] // INTERVAL)


def chunk_at(record: SelectiveScan, n: jax.Array) -> ChunkSlice:
    """The nth chunk."""
    tokens = record.x.shape[1]
    length = min(INTERVAL, tokens)
    first = n * INTERVAL
    start = jnp.minimum(first, tokens - length)
    return ChunkSlice(start, (start + jnp.arange(length, dtype=jnp.int32) >= first)[None, :, None])


def cut(x: jax.Array, at: ChunkSlice) -> jax.Array:
    """A chunk's part of [B, T, ...]."""
    return lax.dynamic_slice_in_dim(x, at.start, at.fresh.shape[1], axis=1)


def paste(x: jax.Array, at: ChunkSlice, part: jax.Array) -> jax.Array:
    """[B, T, ...] with the fresh tokens of a chunk replaced."""
    merged = jnp.where(at.fresh, part.astype(x.dtype), cut(x, at))
    return lax.dynamic_update_slice_in_dim(x, merged, at.start, axis=1)


def load(record: SelectiveScan, at: ChunkSlice) -> Tokens:
    """A chunk's tokens."""
    dtype = accumulator(record)
    step = jnp.where(at.fresh, cut(record.step, at), 0)
    parts = (cut(record.x, at), step, cut(record.write, at), cut(record.read, at))
    return Tokens(*(jnp.moveaxis(part, 1, 0).astype(dtype) for part in parts))
