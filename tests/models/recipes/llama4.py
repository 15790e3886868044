"""Llama 4: attention inside chunks of the sequence, with norms of the rotated queries and keys."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rms_norm, rotate_pairs

from ejkernel.modules import flash_attention, ragged_decode_attention
from ejkernel.types import MaskInfo

SOURCE = "llama4.Llama4TextAttention"
KV_HEADS, HEAD_DIM, CHUNK = 2, 8, 8


def project(w, x, position):
    """Queries, keys and values [B, T, heads, HEAD_DIM] of tokens at these positions [T]."""
    query, key, value = (
        (x @ w[f"{name}_proj.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("q", "k", "v")
    )
    return *(rms_norm(rotate_pairs(part, position, 500000.0), 1.0, 1e-5) for part in (query, key)), value


def output(w, attended):
    return attended.reshape(*attended.shape[:2], -1) @ w["o_proj.weight"].T


def prefill(w, x, cu_seqlens=None):
    position = positions(x.shape[1], cu_seqlens)
    query, key, value = project(w, x, position)
    # A token that starts a chunk starts a segment: packed sequences and their chunks are one thing.
    segments = jnp.broadcast_to(jnp.cumsum(position % CHUNK == 0), x.shape[:2])
    mask = MaskInfo.from_segments(segments)
    return output(w, flash_attention(query, key, value, mask_info=mask, causal=True))


packed = prefill


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, tokens, KV_HEADS, HEAD_DIM)),) * 2


def decode(w, x, cache, position):
    query, *new = project(w, x, position[None])
    keys, values = (old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
    start = jnp.full(len(x), position // CHUNK * CHUNK)
    return output(w, ragged_decode_attention(query, keys, values, start, start * 0 + position + 1)), (keys, values)
