"""Bloom: ALiBi, a bias of a slope per head times the key's position, which no query dimension makes large."""

import jax.numpy as jnp

from ejkernel.modules import flash_attention

SOURCE = "bloom.BloomAttention"
HEADS, HEAD_DIM = 4, 8
SLOPES = jnp.array([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])


def prefill(w, x, cu_seqlens=None):
    fused = (x @ w["query_key_value.weight"].T + w["query_key_value.bias"]).reshape(*x.shape[:2], HEADS, 3, HEAD_DIM)
    query, key, value = (jnp.squeeze(part, 3) for part in jnp.split(fused, 3, axis=3))
    # The softmax of a row does not change with a constant, so the distance to the key may be the key's position.
    bias = (SLOPES[:, None, None] * jnp.arange(x.shape[1]))[None]  # [1, H, 1, S]
    output = flash_attention(query, key, value, bias, cum_seqlens_q=cu_seqlens, causal=True)
    return output.reshape(x.shape) @ w["dense.weight"].T + w["dense.bias"]


packed = prefill
