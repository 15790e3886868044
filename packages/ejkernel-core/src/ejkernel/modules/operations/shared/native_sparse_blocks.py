"""Blocks of native sparse attention: where they lie, their means, and which of them a caller lists."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.segment_pooling import chunk_ranges
from ejkernel.planning import packing


class TokenBlocks(NamedTuple):
    """Blocks of `size` tokens, cut from the first token of every sequence on. B rows, T tokens, M blocks.

    Attributes:
        size: Tokens per block; the last one of a sequence may have fewer.
        ids: [B, T] int32, sequence of every token, < 0 for padding; None where every row is one sequence.
        position_in_sequence: [B|1, T] int32, of every token in its sequence.
        first_block_of_sequence: [B|1, T] int32, the first block of every token's sequence.
        token_ranges: [M, 2] int32, the first token of every block and the one after its last, for packed sequences.
    """

    size: int
    ids: jax.Array | None
    position_in_sequence: jax.Array
    first_block_of_sequence: jax.Array
    token_ranges: jax.Array | None

    @property
    def block_of_token(self) -> jax.Array:
        """Returns [B|1, T] int32, the block of every token; -1 for padding."""
        of_token = self.first_block_of_sequence + self.position_in_sequence // self.size
        return of_token if self.ids is None else jnp.where(self.ids >= 0, of_token, -1)


def make_token_blocks(shape: tuple[int, ...], size: int, cu_seqlens: jax.Array | None) -> TokenBlocks:
    """Returns the blocks of rows of tokens.

    Args:
        shape: B and T, and anything after them.
        size: Tokens per block.
        cu_seqlens: None, [N + 1] with B = 1, or [B + 1]; as in `native_sparse_attention`.
    """
    rows, tokens = shape[:2]
    if cu_seqlens is None:
        position = jnp.arange(tokens, dtype=jnp.int32)[None]
        return TokenBlocks(size, None, position, jnp.zeros((1, 1), jnp.int32), None)
    if rows > 1:
        ids, position = packing.padded_ids(cu_seqlens, tokens)
        return TokenBlocks(size, ids.astype(jnp.int32), position, jnp.zeros((1, 1), jnp.int32), None)
    bounds = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens)
    ids, position = packing.packed_ids(bounds, tokens)
    last = jnp.cumsum(cdiv(jnp.diff(bounds), size), dtype=jnp.int32)
    base = jnp.concatenate([jnp.zeros(1, jnp.int32), last])[jnp.maximum(ids, 0)]
    return TokenBlocks(size, ids, position, base, chunk_ranges(bounds, size, tokens))


def block_means(blocks: TokenBlocks, x: jax.Array) -> jax.Array:
    """Returns the mean of every block over the tokens it has: [B, T, Hk, n] -> [B, M, Hk, n] in the same dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if blocks.ids is not None:
        x = jnp.where((blocks.ids >= 0)[..., None, None], x, 0)
    if blocks.token_ranges is not None:
        first, end = blocks.token_ranges[:, 0], blocks.token_ranges[:, 1]
        token = first[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)
        inside = (token < end[:, None])[..., None, None]
        parts = jnp.where(inside, x[0, jnp.minimum(token, x.shape[1] - 1)], 0)[None]
        counts = jnp.maximum(end - first, 1)[None]
    else:
        rows, tokens, *rest = x.shape
        count = cdiv(tokens, blocks.size)
        x = jnp.pad(x, ((0, 0), (0, count * blocks.size - tokens), (0, 0), (0, 0)))
        parts = x.reshape(rows, count, blocks.size, *rest)
        first = jnp.arange(count, dtype=jnp.int32) * blocks.size
        end = jnp.int32(tokens) if blocks.ids is None else jnp.sum(blocks.ids >= 0, axis=1, dtype=jnp.int32)[:, None]
        counts = jnp.maximum(jnp.minimum(end - first, blocks.size), 1)
        counts = counts[None] if counts.ndim == 1 else counts
    return (jnp.sum(parts, axis=2, dtype=wide) / counts[..., None, None].astype(wide)).astype(x.dtype)


def sequence_of_each_block(blocks: TokenBlocks) -> jax.Array | None:
    """Returns the sequence of every block, [B, M] int32, -1 for blocks without tokens; None where rows
    are sequences.
    """
    if blocks.ids is None:
        return None
    if blocks.token_ranges is None:
        return blocks.ids[:, :: blocks.size]
    first, end = blocks.token_ranges[:, 0], blocks.token_ranges[:, 1]
    return jnp.where(end > first, blocks.ids[0, jnp.minimum(first, blocks.ids.shape[1] - 1)], -1)[None]


def row_block_indices(blocks: TokenBlocks, indices: jax.Array, counts: int | jax.Array) -> jax.Array:
    """Returns the caller's blocks, numbered through the row, each once; -1 for those that a query cannot read.

    Args:
        blocks: The blocks.
        indices: [B, T, Hk, S] int, blocks of each query's own sequence; anything that is none of them is no block.
        counts: How many slots count, for all or as [B, T, Hk].
    """
    slots = jnp.arange(indices.shape[3], dtype=jnp.int32)
    indices = indices.astype(jnp.int32)
    last = (blocks.block_of_token - blocks.first_block_of_sequence)[:, :, None, None]  # -1 at most for padding
    count = counts if isinstance(counts, int) else counts.astype(jnp.int32)[..., None]
    real = (indices >= 0) & (indices <= last) & (slots < count)
    indices = jnp.where(real, indices, -1)
    earlier = slots[:, None] > slots
    repeated = ((indices[..., :, None] == indices[..., None, :]) & earlier).any(axis=-1)
    return jnp.where(real & ~repeated, indices + blocks.first_block_of_sequence[:, :, None, None], -1)
