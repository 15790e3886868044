"""Backward pass of segment pooling: every token gets its share of its pool's cotangent."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.segment_pooling import SegmentPooling, accumulator
from ejkernel.types.pullback import Pullback
from ejkernel_xla.segment_pooling.forward import tokens_per_pool


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradient of the values.

    Args:
        pullback: Record and cotangent [B, M, H, D].
        config: Not read.

    Returns:
        `{"values": [B, T, H, D]}`, in the values' dtype.
    """
    record = pullback.record
    shares = (pullback.cotangent.astype(accumulator(record)) / tokens_per_pool(record)).astype(record.values.dtype)
    if record.ranges is None:
        return {"values": _chunk_gradients(record, shares)}
    return {"values": _range_gradients(record.ranges, record.values.shape[1], shares)}


def _chunk_gradients(record: SegmentPooling, gradient_per_token: jax.Array) -> jax.Array:
    tokens = record.values.shape[1]
    # A broadcast that XLA fuses with the mask: nothing is gathered.
    gradient = jnp.repeat(gradient_per_token, record.chunk_size, axis=1)[:, :tokens]
    if record.lengths is None:
        return gradient
    valid = jnp.arange(tokens, dtype=jnp.int32) < record.lengths[:, None]
    return jnp.where(valid[..., None, None], gradient, 0)


def _range_gradients(ranges: jax.Array, tokens: int, gradient_per_token: jax.Array) -> jax.Array:
    first, end = ranges[:, 0], ranges[:, 1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    # Finds the first pool that ends after a token, which skips empty pools and earlier pools.
    pool = jnp.minimum(jnp.searchsorted(end, token, side="right"), end.shape[0] - 1)
    valid = (token >= first[pool]) & (token < end[pool])
    return jnp.where(valid[:, None, None], gradient_per_token[0, pool], 0)[None]
