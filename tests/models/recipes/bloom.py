"""Bloom: ALiBi, a slope per head times the distance of query and key."""

import jax.numpy as jnp

from ejkernel.modules import flash_attention

SOURCE = "bloom.BloomAttention"
HEADS, HEAD_DIM = 4, 8
SLOPES = jnp.array([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])


def prefill(w, x, cu_seqlens=None):
    fused = (x @ w["query_key_value.weight"].T + w["query_key_value.bias"]).reshape(*x.shape[:2], HEADS, 3, HEAD_DIM)
    query, key, value = (jnp.squeeze(part, 3) for part in jnp.split(fused, 3, axis=3))
    output = flash_attention(query, key, value, cum_seqlens_q=cu_seqlens, alibi_slopes=SLOPES, causal=True)
    return output.reshape(x.shape) @ w["dense.weight"].T + w["dense.bias"]


packed = prefill
