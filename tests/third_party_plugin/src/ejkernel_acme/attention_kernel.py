"""Softmax attention over whole rows, without tiles."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention


def forward(record: TiledAttention, params: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals.

    Args:
        record: The canonical arguments.
        params: Nothing to choose.
    """
    batch, length, heads, size = record.query.shape
    kv_heads = record.key.shape[2]
    query = record.query.reshape(batch, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btgrd,bsgd->bgrts", query, record.key, preferred_element_type=jnp.float32)
    allowed = _allowed(record)[:, None, None]
    scores = jnp.where(allowed, scores * record.softmax_scale, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    # A weight of 0 does not silence a NaN: values that nobody sees are taken out.
    seen = jnp.any(allowed[:, 0, 0], axis=1)[:, :, None, None]
    value = jnp.where(seen, record.value, 0).astype(jnp.float32)
    output = jnp.einsum("bgrts,bsgv->btgrv", weights, value)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + peak, -jnp.inf)
    return (
        output.reshape(batch, length, heads, -1).astype(record.query.dtype),
        SoftmaxResiduals(lse=lse.reshape(batch, heads, length)),
    )


def _allowed(record: TiledAttention) -> jax.Array:
    """Which keys a query sees, bool [B, T, S]."""
    queries, keys = jnp.arange(record.query.shape[1])[:, None], jnp.arange(record.key.shape[1])
    allowed = jnp.ones((record.query.shape[0], queries.size, keys.size), bool)
    left, right = record.sliding_window or (None, None)
    if record.causal:
        allowed &= queries >= keys
    if left is not None:
        allowed &= queries - keys <= left
    if right is not None:
        allowed &= keys - queries <= right
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        q_ids, kv_ids = record.q_segment_ids[:, :, None], record.kv_segment_ids[:, None, :]
        allowed &= (q_ids == kv_ids) & (q_ids >= 0)
    return allowed
