"""Ling (Bailing): delta attention (KDA) whose log decays stay above a bound."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d, kda_decay, kernel_delta_attention

SOURCE = "bailing_hybrid.BailingHybridDeltaAttention"
HEADS, DIM, TAPS = 2, 8, 4
LOWER_BOUND = -5.0


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    shape = (*x.shape[:2], HEADS, DIM)
    hidden = jnp.concatenate([x @ w[f"{name}_proj.weight"].T for name in "qkv"], axis=-1)
    taps = w["conv1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, None, conv_state, cu_seqlens, activation="silu", return_state=True)
    query, key, value = (piece.reshape(shape) for piece in jnp.split(hidden, 3, axis=-1))
    gate = (x @ w["forget_gate.f_proj.weight"].T).reshape(shape)
    decay = kda_decay(gate, w["forget_gate.A_log"], w["forget_gate.dt_bias"], LOWER_BOUND)
    beta = jax.nn.sigmoid(x @ w["b_proj.weight"].T)
    output, state = kernel_delta_attention(
        query, key, value, beta, decay, state, cu_seqlens=cu_seqlens, return_state=True
    )
    output = rms_norm(output, w["o_norm.weight"]) * jax.nn.sigmoid(x @ w["g_proj.weight"].T).reshape(shape)
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T, conv_state, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    return jnp.zeros((batch, 3 * HEADS * DIM, TAPS - 1)), jnp.zeros((batch, HEADS, DIM, DIM))
