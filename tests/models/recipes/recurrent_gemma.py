"""RecurrentGemma's RG-LRU: a recurrence of one gate per channel, which `recurrent_attention` has as `gv`."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import positions

from ejkernel.modules import causal_conv1d, recurrent_attention

SOURCE = "recurrent_gemma.RecurrentGemmaRecurrentBlock"
CHANNELS, HEADS, TAPS = 16, 2, 4


def gate(w, x, name):
    """A sigmoid gate, with a matrix for each block of channels."""
    blocks = x.reshape(*x.shape[:2], HEADS, -1)
    product = jnp.einsum("bthi,hij->bthj", blocks, w[f"rg_lru.{name}_gate_weight"])
    return jax.nn.sigmoid(product + w[f"rg_lru.{name}_gate_bias"]).reshape(x.shape)


def mix(w, x, position, conv_state=None, state=None, cu_seqlens=None):
    """The block over tokens [B, T, width] at positions [T]: (output, new convolution state, new state)."""
    branch = jax.nn.gelu(x @ w["linear_y.weight"].T + w["linear_y.bias"])
    hidden, taps = x @ w["linear_x.weight"].T + w["linear_x.bias"], w["conv_1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, w["conv_1d.bias"], conv_state, cu_seqlens, return_state=True)
    decay = -8 * gate(w, hidden, "recurrent") * jax.nn.softplus(w["rg_lru.recurrent_param"])
    factor = jnp.where(position[:, None] == 0, 1.0, jnp.sqrt(-jnp.expm1(2 * decay)))
    value = (hidden * gate(w, hidden, "input") * factor)[:, :, None]  # one head, with a key of one channel
    one = jnp.ones((*x.shape[:2], 1, 1), x.dtype)
    output, state = recurrent_attention(
        one, one, value, gv=decay[:, :, None], initial_state=state, cu_seqlens=cu_seqlens, return_state=True
    )
    return (output[:, :, 0] * branch) @ w["linear_out.weight"].T + w["linear_out.bias"], conv_state, state


def prefill(w, x):
    return mix(w, x, positions(x.shape[1]))[0]


def packed(w, x, cu_seqlens):
    return mix(w, x, positions(x.shape[1], cu_seqlens), cu_seqlens=cu_seqlens)[0]


def empty_cache(batch, tokens):
    return jnp.zeros((batch, CHANNELS, TAPS - 1)), jnp.zeros((batch, 1, 1, CHANNELS))


def decode(w, x, cache, position):
    output, *cache = mix(w, x, position[None], *cache)
    return output, tuple(cache)
