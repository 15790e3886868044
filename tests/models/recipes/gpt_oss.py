"""GPT-OSS: a sink logit per head, a window in every other layer, biases."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rotate

from ejkernel.modules import flash_attention, ragged_decode_attention

SOURCE = "gpt_oss.GptOssAttention"
KV_HEADS, HEAD_DIM = 2, 8
WINDOW = (4, 0)


def project(w, x, position):
    """Queries, keys and values [B, T, heads, HEAD_DIM] of tokens at these positions [T]."""
    query, key, value = (
        (x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]).reshape(*x.shape[:2], -1, HEAD_DIM)
        for name in ("q", "k", "v")
    )
    return rotate(query, position), rotate(key, position), value


def output(w, attended):
    return attended.reshape(*attended.shape[:2], -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


def prefill(w, x):
    query, key, value = project(w, x, positions(x.shape[1]))
    return output(w, flash_attention(query, key, value, softmax_aux=w["sinks"], causal=True, sliding_window=WINDOW))


def packed(w, x, cu_seqlens):
    query, key, value = project(w, x, positions(x.shape[1], cu_seqlens))
    return output(
        w,
        flash_attention(
            query, key, value, cum_seqlens_q=cu_seqlens, softmax_aux=w["sinks"], causal=True, sliding_window=WINDOW
        ),
    )


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, tokens, KV_HEADS, HEAD_DIM)),) * 2


def decode(w, x, cache, position):
    query, *new = project(w, x, position[None])
    keys, values = (old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
    start = jnp.zeros(len(x), jnp.int32)
    attended = ragged_decode_attention(
        query, keys, values, start, start + position + 1, softmax_aux=w["sinks"], sliding_window=WINDOW
    )
    return output(w, attended), (keys, values)
