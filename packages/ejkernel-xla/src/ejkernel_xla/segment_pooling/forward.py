"""Forward pass of segment pooling: sums over chunks of equal size, or over runs of tokens of any length."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.segment_pooling import SegmentPooling, accumulator, spans
from ejkernel_xla.segment_pooling.tiles import block_size


def forward(record: SegmentPooling, config: Any) -> tuple[jax.Array, tuple[()]]:
    """Means of a record.

    Args:
        record: The canonical arguments.
        config: The operation's configuration; reads `block_size`.

    Returns:
        [B, M, H, D] in the values' dtype. There are no residuals.
    """
    if record.ranges is None:
        sums = _chunk_sums(record)
    else:
        sums = _range_sums(record, record.ranges, block_size(record, config))
    return (sums / counts(record)).astype(record.values.dtype), ()


def counts(record: SegmentPooling) -> jax.Array:
    """Tokens of every pool, at least 1: [B|1, M, 1, 1]."""
    first, end = spans(record)
    return jnp.maximum(end - first, 1)[..., None, None].astype(accumulator(record))


def _chunk_sums(record: SegmentPooling) -> jax.Array:
    """Sums over chunks of equal size, [B, M, H, D]."""
    values, size = record.values, record.chunk_size
    if record.lengths is not None:
        token = jnp.arange(values.shape[1], dtype=jnp.int32)
        values = jnp.where((token < record.lengths[:, None])[..., None, None], values, 0)
    rows, tokens, *channels = values.shape
    whole = tokens // size * size
    chunks = values[:, :whole].reshape(rows, whole // size, size, *channels)
    sums = jnp.sum(chunks, axis=2, dtype=accumulator(record))
    if whole == tokens:
        return sums
    rest = jnp.sum(values[:, whole:], axis=1, keepdims=True, dtype=accumulator(record))
    return jnp.concatenate([sums, rest], axis=1)


def _range_sums(record: SegmentPooling, ranges: jax.Array, size: int) -> jax.Array:
    """Sums over runs of any length, `size` tokens at a time, [1, M, H, D]."""
    _, tokens, *channels = record.values.shape
    values = record.values.reshape(tokens, -1)

    def pool(m: jax.Array, sums: jax.Array) -> jax.Array:
        first, end = ranges[m, 0], ranges[m, 1]

        def tile(n: jax.Array, total: jax.Array) -> jax.Array:
            start = first + n * size
            at = jnp.minimum(start, tokens - size)  # the last tile is moved back into the array
            token = at + jnp.arange(size, dtype=jnp.int32)
            part = lax.dynamic_slice_in_dim(values, at, size).astype(sums.dtype)
            return total + jnp.sum(jnp.where(((token >= start) & (token < end))[:, None], part, 0), axis=0)

        tiles = -(-(end - first) // size)
        total = lax.fori_loop(jnp.int32(0), tiles, tile, jnp.zeros(values.shape[1], sums.dtype))
        return lax.dynamic_update_index_in_dim(sums, total, m, 0)

    sums = jnp.zeros((ranges.shape[0], values.shape[1]), accumulator(record))
    sums = lax.fori_loop(jnp.int32(0), jnp.int32(ranges.shape[0]), pool, sums)
    return sums.reshape(1, -1, *channels)
