"""Rotary positions, and the root-mean-square norm: what nearly every recipe needs around the attention call."""

import jax
import jax.numpy as jnp
import numpy as np


def positions(tokens: int, cu_seqlens: jax.Array | None = None) -> jax.Array:
    """The position of each token in its sequence, [tokens]."""
    token = jnp.arange(tokens)
    if cu_seqlens is None:
        return token
    return token - cu_seqlens[jnp.searchsorted(cu_seqlens, token, side="right") - 1]


def rotate(x: jax.Array, position: jax.Array, base: float = 10000.0, features: int | None = None) -> jax.Array:
    """Rotates the first `features` of x [B, T, H, D], or all, by positions [T]: Llama's form, of two halves."""
    features = features or x.shape[-1]
    half = features // 2
    angle = position[:, None] * base ** (-np.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second, rest = x[..., :half], x[..., half:features], x[..., features:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Divides x by its root mean square over the last axis and multiplies by the weight."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def rotate_pairs(x: jax.Array, position: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotates neighbouring features of x [B, T, H, D] by positions [T]: the form of DeepSeek, GPT-J and Llama 4.

    The pairs come out as two halves. Scores do not depend on the order, as long as queries and keys share it.
    """
    x = x.reshape(*x.shape[:-1], -1, 2)
    return rotate(jnp.concatenate([x[..., 0], x[..., 1]], axis=-1), position, base)
