"""Rotary positions, as Llama and most models after it apply them: the halves of a head rotate."""

import jax
import jax.numpy as jnp
import numpy as np


def positions(tokens: int, cu_seqlens: jax.Array | None = None) -> jax.Array:
    """The position of each token in its sequence, [tokens]."""
    token = jnp.arange(tokens)
    if cu_seqlens is None:
        return token
    return token - cu_seqlens[jnp.searchsorted(cu_seqlens, token, side="right") - 1]


def rotate(x: jax.Array, position: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotates x [B, T, H, D] by its positions [T]: feature i of the first half turns with feature i of the second."""
    half = x.shape[-1] // 2
    angle = position[:, None] * base ** (-np.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
