"""Causal attention of grouped queries with rotary positions. Models differ in the projections and in the scores."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rotate

from ejkernel.modules import flash_attention, ragged_decode_attention

KV_HEADS, HEAD_DIM = 2, 8


def project(w, x, position):
    """Queries, keys and values [B, T, heads, HEAD_DIM] of tokens at these positions [T]; rotated queries and keys."""
    query, key, value = heads(w, x)
    return rotate(query, position), rotate(key, position), value


def heads(w, x):
    """Queries, keys and values [B, T, heads, HEAD_DIM] of tokens, before any rotation."""
    return ((x @ w[f"{name}_proj.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("q", "k", "v"))


def project_output(w, attended):
    return attended.reshape(*attended.shape[:2], -1) @ w["o_proj.weight"].T


def functions_of(terms=lambda w: {}, project=project, project_output=project_output):
    """Returns `prefill`, `packed` and `decode` of a layer.

    Args:
        terms: Maps the weights to the arguments of the attention calls that the model has.
        project: Maps the weights, tokens and positions to queries, keys and values.
        project_output: Maps the weights and what the heads attended to the layer's output.
    """

    def prefill(w, x, cu_seqlens=None):
        query, key, value = project(w, x, positions(x.shape[1], cu_seqlens))
        attended = flash_attention(query, key, value, cum_seqlens_q=cu_seqlens, causal=True, **terms(w))
        return project_output(w, attended)

    def decode(w, x, cache, position):
        query, *new = project(w, x, position[None])
        keys, values = (old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
        start = jnp.zeros(len(x), jnp.int32)
        attended = ragged_decode_attention(query, keys, values, start, start + position + 1, **terms(w))
        return project_output(w, attended), (keys, values)

    return prefill, prefill, decode


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, tokens, KV_HEADS, HEAD_DIM)),) * 2
