"""The chunks of a record, in the order in which states pass through them, and the parts of its arrays they cover.

Rows are cut where they stand; packed sequences are each cut from their own first token on, so that no chunk has tokens
of two of them, and those of a single token have none (see `singles`). A last chunk that would end behind the array is
moved back; the tokens it then shares with an earlier chunk, or another sequence, take part in nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import (
    TOKEN_FIELDS,
    LinearRecurrence,
    accumulator,
    head_count,
    segment_roles,
)
from ejkernel_xla.linear_recurrence.chunk import Chunk
from ejkernel_xla.tiled_attention.blocks import add, put, take


class Place(NamedTuple):
    """One chunk.

    Attributes:
        sequence: Packed sequence it belongs to; 0 without packing.
        start: First token of its slice.
        first: First token that takes part.
        end: The token after the last one that does.
    """

    sequence: Any
    start: Any
    first: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a record is cut into chunks of `length` tokens.

    Attributes:
        length: Tokens a chunk, a power of two and at most T.
        tokens: T.
        most: The most chunks there can be.
        count: How many there are; traced for packed sequences.
        bounds: int32 [N + 1] cumulative lengths of packed sequences; None without packing.
        last: int32 [N] chunks up to and with each sequence, none of those of one token; None without packing.
        roles: Real and restarting tokens, bool [B, T]; None without segments.
    """

    length: int
    tokens: int
    most: int
    count: Any
    bounds: jax.Array | None
    last: jax.Array | None
    roles: tuple[jax.Array, jax.Array] | None

    def place(self, step: Any) -> Place:
        """The chunk at a step."""
        if self.bounds is None or self.last is None:
            first = step * self.length
            return Place(0, jnp.minimum(first, self.tokens - self.length), first, self.tokens)
        sequence = jnp.searchsorted(self.last, step, side="right").astype(jnp.int32)
        begin, end = self.bounds[sequence], self.bounds[sequence + 1]
        chunks = -(-(end - begin) // self.length)
        first = begin + (chunks - (self.last[sequence] - step)) * self.length
        return Place(sequence, jnp.minimum(first, self.tokens - self.length), first, end)

    @property
    def whole(self) -> bool:
        """Whether every token of every chunk takes part."""
        return self.bounds is None and self.roles is None and self.tokens % self.length == 0


def make_walk(record: LinearRecurrence, length: int) -> Walk:
    """Cuts a record with at least one token into chunks of at most `length` tokens."""
    tokens = record.query.shape[1]
    length = 2 ** (min(length, tokens).bit_length() - 1)
    roles = None if record.segment_ids is None else segment_roles(record.segment_ids)
    if record.cu_seqlens is None:
        count = -(-tokens // length)
        return Walk(length, tokens, count, count, None, None, roles)
    bounds = record.cu_seqlens.astype(jnp.int32)
    sizes = jnp.diff(bounds)
    last = jnp.cumsum(jnp.where(sizes > 1, -(-sizes // length), 0), dtype=jnp.int32)
    most = tokens // length + min(bounds.shape[0] - 1, tokens // 2)
    return Walk(length, tokens, most, last[-1], bounds, last, roles)


def slices(record: LinearRecurrence, walk: Walk, at: Place) -> dict[str, jax.Array]:
    """The parts of a record's arrays that a chunk covers, as they lie: [B|1, C|1, heads, ...]."""
    arrays = {name: getattr(record, name) for name in TOKEN_FIELDS}
    return {name: cut(x, walk, at) for name, x in arrays.items() if x is not None}


def cut(x: jax.Array, walk: Walk, at: Place) -> jax.Array:
    """The part of one array, [B|1, C|1, ...]."""
    return take(x, (0, at.start, *(0,) * (x.ndim - 2)), (x.shape[0], walk.length, *x.shape[2:]))


def paste(x: jax.Array, part: jax.Array, at: Place) -> jax.Array:
    """x with a part added where `cut` took it."""
    return add(x, (0, at.start, *(0,) * (x.ndim - 2)), part.astype(x.dtype))


def replace(x: jax.Array, part: jax.Array, at: Place) -> jax.Array:
    """x with a part where `cut` took it, for chunks that share no token."""
    return put(x, (0, at.start, *(0,) * (x.ndim - 2)), part.astype(x.dtype))


def taking_part(walk: Walk, at: Place) -> jax.Array | None:
    """Which tokens of a chunk do, bool [B|1, C]; None when all of them."""
    if walk.whole:
        return None
    token = at.start + jnp.arange(walk.length, dtype=jnp.int32)
    part = ((token >= at.first) & (token < at.end))[None]
    return part if walk.roles is None else part & cut(walk.roles[0], walk, at)


def assemble(record: LinearRecurrence, walk: Walk, at: Place, parts: dict[str, jax.Array]) -> Chunk:
    """A chunk from its slices, in the accumulator's dtype; differentiable in them.

    Tokens that take part in nothing get zeros, whatever their slices hold.
    """
    real, dtype, rows = taking_part(walk, at), accumulator(record), record.query.shape[0]

    def canonical(name: str, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        if real is not None:
            x = jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0)
        heads = head_count(record) if name == "decay" else x.shape[2]
        return together(jnp.broadcast_to(x, (rows, walk.length, heads, *x.shape[3:])))

    made: dict[str, Any] = {name: canonical(name, parts[name]) if name in parts else None for name in TOKEN_FIELDS}
    if walk.roles is not None and real is not None:  # to restart from a zero state is to forget everything
        restart = jnp.repeat(cut(walk.roles[1], walk, at) & real, head_count(record), axis=0)[..., None]
        made["decay"] = jnp.where(restart, -jnp.inf, 0 if made["decay"] is None else made["decay"]).astype(dtype)
    return Chunk(**made)


def together(x: jax.Array) -> jax.Array:
    """[r, C, heads, ...] as [r * heads, C, ...]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def apart(x: jax.Array, heads: int) -> jax.Array:
    """[r * heads, C, ...] as [r, C, heads, ...]."""
    return jnp.swapaxes(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


def loop(count: Any, body: Any, carry: Any) -> Any:
    """`lax.fori_loop` from 0, without a loop around a single step."""
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
