"""DiffLlama's differential attention: the difference of two softmaxes over the same values."""

import math

import jax.numpy as jnp
from tests.models.recipes.common import positions, rms_norm, rotate

from ejkernel.modules import flash_attention

SOURCE = "diffllama.DiffLlamaAttention"
HEADS, HEAD_DIM, LAYER = 4, 8, 0
LAMBDA = 0.8 - 0.6 * math.exp(-0.3 * LAYER)


def prefill(w, x, cu_seqlens=None):
    position = positions(x.shape[1], cu_seqlens)
    query, key, value = (
        (x @ w[f"{name}_proj.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("q", "k", "v")
    )
    query, key = rotate(query, position), rotate(key, position)
    # Two halves of the KV heads' values side by side: values of twice the head dimension, the same for both halves.
    value = jnp.concatenate(jnp.split(value, 2, axis=2), axis=-1)
    value = jnp.concatenate([value, value], axis=2)
    output = flash_attention(query, key, value, cum_seqlens_q=cu_seqlens, causal=True)
    first, second = jnp.split(output, 2, axis=2)
    plus, minus = (jnp.exp(jnp.sum(w[f"lambda_q{n}"] * w[f"lambda_k{n}"])) for n in (1, 2))
    output = rms_norm(first - (plus - minus + LAMBDA) * second, 1.0, 1e-5) * (1 - LAMBDA)
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T


packed = prefill
