"""MiMo V2 Flash: values narrower than keys, partly rotated heads, sinks and a window."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rotate

from ejkernel.modules import flash_attention, ragged_decode_attention

SOURCE = "mimo_v2_flash.MiMoV2FlashAttention"
HEAD_DIM, VALUE_DIM, KV_HEADS, ROTATED = 12, 8, 2, 4
WINDOW = (4, 0)
VALUE_SCALE = 0.707


def project(w, x, position):
    """Queries and keys [B, T, heads, HEAD_DIM], values [B, T, heads, VALUE_DIM] of tokens at these positions [T]."""
    query, key = ((x @ w[f"{name}_proj.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("q", "k"))
    value = VALUE_SCALE * (x @ w["v_proj.weight"].T).reshape(*x.shape[:2], -1, VALUE_DIM)
    return rotate(query, position, features=ROTATED), rotate(key, position, features=ROTATED), value


def output(w, attended):
    return attended.reshape(*attended.shape[:2], -1) @ w["o_proj.weight"].T


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
    return tuple(jnp.zeros((batch, tokens, KV_HEADS, size)) for size in (HEAD_DIM, VALUE_DIM))


def decode(w, x, cache, position):
    query, *new = project(w, x, position[None])
    keys, values = (old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
    start = jnp.zeros(len(x), jnp.int32)
    attended = ragged_decode_attention(
        query, keys, values, start, start + position + 1, softmax_aux=w["sinks"], sliding_window=WINDOW
    )
    return output(w, attended), (keys, values)
