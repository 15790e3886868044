"""Blocks of native sparse attention: where they lie, their means, and which of them each query reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.segment_pooling import chunk_ranges
from ejkernel.planning import packing
from ejkernel.planning.precision import product_precision

SCORES = 2**20
"""Scores of queries and blocks held at once where blocks are selected."""


class Blocks(NamedTuple):
    """Blocks of `size` tokens, cut from the first token of every sequence on. B rows, T tokens, M blocks.

    Attributes:
        size: Tokens a block; the last one of a sequence may have fewer.
        ids: [B, T] int32, sequence of every token, < 0 for padding; None where every row is one sequence.
        position: [B|1, T] int32, of every token in its sequence.
        base: [B|1, T] int32, the first block of every token's sequence.
        ranges: [M, 2] int32, the first token of every block and the one after its last, for packed sequences.
    """

    size: int
    ids: jax.Array | None
    position: jax.Array
    base: jax.Array
    ranges: jax.Array | None

    @property
    def own(self) -> jax.Array:
        """[B|1, T] int32, the block of every token; -1 for padding."""
        own = self.base + self.position // self.size
        return own if self.ids is None else jnp.where(self.ids >= 0, own, -1)


def find_blocks(shape: tuple[int, ...], size: int, cu_seqlens: jax.Array | None) -> Blocks:
    """The blocks of rows of tokens.

    Args:
        shape: B and T, and anything behind them.
        size: Tokens a block.
        cu_seqlens: None, [N + 1] with B = 1, or [B + 1]; as in `native_sparse_attention`.
    """
    rows, tokens = shape[:2]
    if cu_seqlens is None:
        position = jnp.arange(tokens, dtype=jnp.int32)[None]
        return Blocks(size, None, position, jnp.zeros((1, 1), jnp.int32), None)
    if rows > 1:
        ids, position = packing.padded_ids(cu_seqlens, tokens)
        return Blocks(size, ids.astype(jnp.int32), position, jnp.zeros((1, 1), jnp.int32), None)
    bounds = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens)
    ids, position = packing.packed_ids(bounds, tokens)
    last = jnp.cumsum(-(-jnp.diff(bounds) // size), dtype=jnp.int32)
    base = jnp.concatenate([jnp.zeros(1, jnp.int32), last])[jnp.maximum(ids, 0)]
    return Blocks(size, ids, position, base, chunk_ranges(bounds, size, tokens))


def block_means(blocks: Blocks, x: jax.Array) -> jax.Array:
    """The mean of every block over the tokens it has: [B, T, Hk, n] -> [B, M, Hk, n] in the same dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if blocks.ids is not None:
        x = jnp.where((blocks.ids >= 0)[..., None, None], x, 0)
    if blocks.ranges is not None:
        first, end = blocks.ranges[:, 0], blocks.ranges[:, 1]
        token = first[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)
        inside = (token < end[:, None])[..., None, None]
        parts = jnp.where(inside, x[0, jnp.minimum(token, x.shape[1] - 1)], 0)[None]
        counts = jnp.maximum(end - first, 1)[None]
    else:
        rows, tokens, *rest = x.shape
        count = -(-tokens // blocks.size)
        x = jnp.pad(x, ((0, 0), (0, count * blocks.size - tokens), (0, 0), (0, 0)))
        parts = x.reshape(rows, count, blocks.size, *rest)
        first = jnp.arange(count, dtype=jnp.int32) * blocks.size
        end = jnp.int32(tokens) if blocks.ids is None else jnp.sum(blocks.ids >= 0, axis=1, dtype=jnp.int32)[:, None]
        counts = jnp.maximum(jnp.minimum(end - first, blocks.size), 1)
        counts = counts[None] if counts.ndim == 1 else counts
    return (jnp.sum(parts, axis=2, dtype=wide) / counts[..., None, None].astype(wide)).astype(x.dtype)


def block_ids(blocks: Blocks) -> jax.Array | None:
    """The sequence of every block, [B, M] int32, -1 for blocks without tokens; None where rows are sequences."""
    if blocks.ids is None:
        return None
    if blocks.ranges is None:
        return blocks.ids[:, :: blocks.size]
    first, end = blocks.ranges[:, 0], blocks.ranges[:, 1]
    return jnp.where(end > first, blocks.ids[0, jnp.minimum(first, blocks.ids.shape[1] - 1)], -1)[None]


def listed(blocks: Blocks, indices: jax.Array, counts: int | jax.Array) -> jax.Array:
    """The caller's blocks, numbered through the row, each once; -1 for those that a query cannot read.

    Args:
        blocks: The blocks.
        indices: [B, T, Hk, S] int, blocks of each query's own sequence; anything that is none of them is no block.
        counts: How many slots count, for all or as [B, T, Hk].
    """
    slots = jnp.arange(indices.shape[3], dtype=jnp.int32)
    indices = indices.astype(jnp.int32)
    last = (blocks.own - blocks.base)[:, :, None, None]  # -1 at most for padding
    count = counts if isinstance(counts, int) else counts.astype(jnp.int32)[..., None]
    real = (indices >= 0) & (indices <= last) & (slots < count)
    indices = jnp.where(real, indices, -1)
    earlier = slots[:, None] > slots
    again = ((indices[..., :, None] == indices[..., None, :]) & earlier).any(axis=-1)
    return jnp.where(real & ~again, indices + blocks.base[:, :, None, None], -1)


def select(blocks: Blocks, query: jax.Array, means: jax.Array, scale: float, count: int) -> jax.Array:
    """The blocks with the largest weight in the compressed branch, its query heads together, [B, T, Hk, N] int32.

    A query's own block comes first; blocks behind it are never taken, and of two with equal weight the later one is.
    N is `count`, or the number of blocks where there are fewer; -1 fills up what is left.

    Args:
        blocks: The blocks.
        query: [B, T, H, D].
        means: [B, M, Hk, D], block means of the keys.
        scale: Factor on the scores.
        count: Blocks a query.
    """
    query, means = lax.stop_gradient((query, means))
    rows, tokens, heads, _ = query.shape
    tile = max(1, min(tokens, SCORES // max(1, rows * heads * means.shape[1])))
    tiles = -(-tokens // tile)
    others = min(count, means.shape[1]) - 1

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, tiles * tile - tokens), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], tiles, tile, *x.shape[2:]).swapaxes(0, 1)

    def pick(inputs: tuple[jax.Array, ...]) -> jax.Array:
        part, *where = inputs
        weights = _weights(blocks.size, part, means, scale, *where)
        return _largest(weights, others)

    position, base = (jnp.broadcast_to(x, (blocks.position.shape[0], tokens)) for x in (blocks.position, blocks.base))
    picks = lax.map(pick, (split(query), split(position), split(base)))
    picks = picks.swapaxes(0, 1).reshape(rows, tiles * tile, *picks.shape[3:])[:, :tokens]
    own = jnp.broadcast_to(blocks.own[:, :, None, None], (rows, tokens, means.shape[2], 1))
    return jnp.concatenate([own, jnp.where(own >= 0, picks, -1)], axis=-1)


def _weights(
    size: int, query: jax.Array, means: jax.Array, scale: float, position: jax.Array, base: jax.Array
) -> jax.Array:
    """Softmax weights of the complete blocks, summed over query heads, [B, t, Hk, M]; -1 where nothing is to take."""
    rows, tile, heads, channels = query.shape
    kv_heads = means.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(rows, tile, kv_heads, heads // kv_heads, channels)
    exact: Any = {"precision": product_precision(query.dtype), "preferred_element_type": wide}
    scores = jnp.einsum("btghd,bmgd->btghm", grouped, means, **exact) * scale
    block = jnp.arange(means.shape[1], dtype=jnp.int32)
    position, base = position[:, :, None, None, None], base[:, :, None, None, None]
    complete = (block >= base) & (block < base + (position + 1) // size)
    peak = jnp.max(scores, axis=-1, keepdims=True, where=complete, initial=-jnp.inf)
    weights = jnp.where(complete, jnp.exp(jnp.where(complete, scores - peak, 0)), 0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
    before = complete & (block < base + position // size)
    return jnp.where(before, weights, 0).sum(axis=3) - jnp.where(before[:, :, :, 0], 0, 1)


def _largest(weights: jax.Array, count: int) -> jax.Array:
    """The indices of the `count` largest weights that are not negative, ties to the later; -1 fills up."""
    *lead, blocks = weights.shape
    if not count:
        return jnp.zeros((*lead, 0), jnp.int32)
    values, found = lax.top_k(weights.reshape(-1, blocks)[:, ::-1], count)
    found = jnp.where(values >= 0, blocks - 1 - found.astype(jnp.int32), -1)
    return found.reshape(*lead, count)
