"""MiniMax's lightning attention: a fixed decay per head and layer, after an activation of queries, keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import lightning_attention

SOURCE = "minimax.MiniMaxLightningAttention"
HEADS, DIM, LAYER, LAYERS = 4, 8, 1, 4
# MiniMax lowers the slopes of ALiBi from layer to layer.
SLOPES = 2.0 ** (-8 / HEADS * np.arange(1, HEADS + 1)) * (1 - LAYER / (LAYERS - 1 + 1e-5) + 1e-5)


def mix(w, x, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given state: (output, new state)."""
    fused = jax.nn.silu(x @ w["qkv_proj.weight"].T).reshape(*x.shape[:2], HEADS, 3 * DIM)
    query, key, value = jnp.split(fused, 3, axis=-1)
    output, state = lightning_attention(
        query,
        key,
        value,
        state,
        cu_seqlens,
        slopes=jnp.asarray(SLOPES, x.dtype),
        softmax_scale=1.0,
        return_state=True,
    )
    output = rms_norm(output.reshape(*x.shape[:2], -1), w["norm.weight"])
    return (jax.nn.sigmoid(x @ w["output_gate.weight"].T) * output) @ w["out_proj.weight"].T, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, HEADS, DIM, DIM)),)
