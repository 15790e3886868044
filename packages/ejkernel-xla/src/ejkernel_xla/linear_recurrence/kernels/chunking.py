"""The chunks of a record, in the order of state passing, and the slices of its arrays they cover.

Packed sequences are each cut from their first token on, so that no chunk has tokens of two of them; those of a single
token have no chunk (see `single_tokens`). A last chunk that would end past the array is moved back, and the tokens
that it then shares with an earlier chunk or another sequence are masked.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import at_most, cdiv, is_symbolic
from ejkernel.families.linear_recurrence import (
    TOKEN_FIELDS,
    LinearRecurrence,
    accumulator,
    num_state_heads,
    real_and_segment_start_tokens,
)
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel_xla.linear_recurrence.kernels.chunk import ChunkTokens
from ejkernel_xla.tiled_attention.plan import add, put, take


class ChunkSlice(NamedTuple):
    """One chunk.

    Attributes:
        sequence: Packed sequence it belongs to; 0 without packing.
        start: First token of its slice.
        first: First token that is not masked.
        end: The token after the last one that is not masked.
    """

    sequence: Any
    start: Any
    first: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How a record is cut into chunks of `length` tokens.

    Attributes:
        length: Tokens per chunk, a power of two and at most T.
        tokens: T, those that fill up the last chunk among them.
        num_real: T without those.
        max_chunks: The most chunks there can be.
        count: How many there are; traced for packed sequences.
        bounds: int32 [N + 1] cumulative lengths of packed sequences; None without packing.
        last: int32 [N] chunks up to and with each sequence, none of those of one token; None without packing.
        real_and_start_tokens: Real and restarting tokens, bool [B, T]; None without segments.
    """

    length: int
    tokens: Any
    num_real: Any
    max_chunks: int
    count: Any
    bounds: jax.Array | None
    last: jax.Array | None
    real_and_start_tokens: tuple[jax.Array, jax.Array] | None

    def chunk_at(self, step: Any) -> ChunkSlice:
        """Returns the chunk at a step."""
        if self.bounds is None or self.last is None:
            first = step * self.length
            return ChunkSlice(0, jnp.minimum(first, self.tokens - self.length), first, self.num_real)
        sequence = jnp.searchsorted(self.last, step, side="right").astype(jnp.int32)
        begin, end = self.bounds[sequence], self.bounds[sequence + 1]
        chunks = cdiv(end - begin, self.length)
        first = begin + (chunks - (self.last[sequence] - step)) * self.length
        return ChunkSlice(sequence, jnp.minimum(first, self.tokens - self.length), first, end)

    @property
    def has_no_masked_token(self) -> bool:
        """Returns whether no token of any chunk is masked."""
        has_masked_chunk = is_symbolic(self.tokens) or self.tokens % self.length != 0
        return self.bounds is None and self.real_and_start_tokens is None and not has_masked_chunk


def chunk_length(tokens: Any, length: int) -> int:
    """Returns the tokens of a chunk, the largest power of 2 that is at most `length` and all tokens."""
    return 2 ** (at_most(length, tokens).bit_length() - 1)


def fill_last_chunk(record: LinearRecurrence, length: int) -> LinearRecurrence:
    """Returns the record with padding up to a whole chunk, if the count of its tokens is symbolic: it may be smaller
    than a chunk, which cannot then be moved back.
    """
    tokens = record.query.shape[1]
    if not is_symbolic(tokens):
        return record
    length = chunk_length(tokens, length)
    missing = cdiv(tokens, length) * length - tokens
    arrays = {name: getattr(record, name) for name in TOKEN_FIELDS}
    padded = {name: pad_axis(x, 1, missing) for name, x in arrays.items() if x is not None and is_symbolic(x.shape[1])}
    if record.segment_ids is not None:
        padded["segment_ids"] = jnp.pad(record.segment_ids, ((0, 0), (0, missing)), constant_values=-1)
    return dataclasses.replace(record, **padded)


def make_chunking(record: LinearRecurrence, length: int, num_real: Any = None) -> Chunking:
    """Cuts a record with at least one token into chunks of at most `length` tokens.

    Args:
        record: The record, as `fill_last_chunk` returns it.
        length: Tokens per chunk, at most.
        num_real: Tokens without those that fill up the last chunk; None for all.
    """
    tokens = record.query.shape[1]
    num_real = tokens if num_real is None else num_real
    length = chunk_length(tokens, length)
    roles = None if record.segment_ids is None else real_and_segment_start_tokens(record.segment_ids)
    if record.cu_seqlens is None:
        count = cdiv(tokens, length)
        return Chunking(length, tokens, num_real, count, count, None, None, roles)
    # Lengths that are constants of the program would make the trip count and the offsets of slices constant
    # too. XLA for GPUs then evaluates an offset for each step, and fails to compile where it depends on a table that
    # the loop carries: "Failed to evaluate instruction ... since it depends on infeed or parameters".
    bounds = lax.optimization_barrier(record.cu_seqlens.astype(jnp.int32))
    sizes = jnp.diff(bounds)
    last = jnp.cumsum(jnp.where(sizes > 1, cdiv(sizes, length), 0), dtype=jnp.int32)
    max_chunks = tokens // length + at_most(bounds.shape[0] - 1, tokens // 2)
    return Chunking(length, tokens, num_real, max_chunks, last[-1], bounds, last, roles)


def slices_of_chunk(record: LinearRecurrence, chunking: Chunking, at: ChunkSlice) -> dict[str, jax.Array]:
    """Returns the parts of a record's arrays that a chunk covers, in their layout: [B|1, C|1, heads, ...]."""
    arrays = {name: getattr(record, name) for name in TOKEN_FIELDS}
    return {name: cut(x, chunking, at) for name, x in arrays.items() if x is not None}


def cut(x: jax.Array, chunking: Chunking, at: ChunkSlice) -> jax.Array:
    """Returns the part of one array, [B|1, C|1, ...]."""
    return take(x, (0, at.start, *(0,) * (x.ndim - 2)), (x.shape[0], chunking.length, *x.shape[2:]))


def add_chunk_slice(x: jax.Array, part: jax.Array, at: ChunkSlice) -> jax.Array:
    """Returns x with a part added where `cut` took it."""
    return add(x, (0, at.start, *(0,) * (x.ndim - 2)), part.astype(x.dtype))


def replace_chunk_slice(x: jax.Array, part: jax.Array, at: ChunkSlice) -> jax.Array:
    """Returns x with a part where `cut` took it, for chunks that share no token."""
    return put(x, (0, at.start, *(0,) * (x.ndim - 2)), part.astype(x.dtype))


def valid_tokens(chunking: Chunking, at: ChunkSlice) -> jax.Array | None:
    """Returns which tokens of a chunk are not masked, bool [B|1, C]; None when all of them."""
    if chunking.has_no_masked_token:
        return None
    token = at.start + jnp.arange(chunking.length, dtype=jnp.int32)
    part = ((token >= at.first) & (token < at.end))[None]
    return (
        part if chunking.real_and_start_tokens is None else part & cut(chunking.real_and_start_tokens[0], chunking, at)
    )


def chunk_from_slices(
    record: LinearRecurrence,
    chunking: Chunking,
    at: ChunkSlice,
    parts: dict[str, jax.Array],
    run: jax.Array | None = None,
) -> ChunkTokens:
    """Returns a chunk from its slices, in the accumulator's dtype; differentiable in them.

    Masked tokens get zeros, whatever their slices hold; with `run`, bool [B, C], those outside of it too.
    """
    valid, dtype, rows = valid_tokens(chunking, at), accumulator(record), record.query.shape[0]
    valid = valid if run is None else run

    def in_canonical_layout(name: str, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        if valid is not None:
            # Selected, not multiplied: padding may hold NaN. A gate of 0 decays nothing, and a key of 0 writes nothing.
            x = jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0)
        heads = num_state_heads(record) if name == "decay" else x.shape[2]
        return merge_heads(jnp.broadcast_to(x, (rows, chunking.length, heads, *x.shape[3:])))

    fields: dict[str, Any] = {
        name: in_canonical_layout(name, parts[name]) if name in parts else None for name in TOKEN_FIELDS
    }
    return ChunkTokens(**fields)


def merge_heads(x: jax.Array) -> jax.Array:
    """Returns [r, C, heads, ...] as [r * heads, C, ...]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns [r * heads, C, ...] as [r, C, heads, ...]."""
    return jnp.swapaxes(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


def run_loop(count: Any, body: Any, carry: Any) -> Any:
    """Runs `lax.fori_loop` from 0; a single step runs without a loop."""
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
