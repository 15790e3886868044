"""Kimi Linear's delta attention (KDA): a gate per key channel."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d, kda_decay, kernel_delta_attention

SOURCE = "kimi_linear.KimiLinearDeltaAttention"
HEADS, DIM, TAPS = 2, 8, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    shape = (*x.shape[:2], HEADS, DIM)
    hidden = jnp.concatenate([x @ w[f"{name}_proj.weight"].T for name in ("q", "k", "v")], axis=-1)
    taps = w["conv1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, None, conv_state, cu_seqlens, activation="silu", return_state=True)
    query, key, value = (part.reshape(shape) for part in jnp.split(hidden, 3, axis=-1))
    gate = (x @ w["forget_gate.f_a_proj.weight"].T @ w["forget_gate.f_b_proj.weight"].T).reshape(shape)
    # The checkpoint stores A_log as [1, 1, H, 1] and dt_bias as [H * K].
    decay = kda_decay(gate, w["forget_gate.A_log"].reshape(HEADS), w["forget_gate.dt_bias"].reshape(HEADS, DIM))
    beta = jax.nn.sigmoid(x @ w["b_proj.weight"].T)
    output, state = kernel_delta_attention(
        query, key, value, beta, decay, state, cu_seqlens=cu_seqlens, return_state=True
    )
    gate = (x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T).reshape(shape)
    output = rms_norm(output, w["o_norm.weight"], 1e-5) * jax.nn.sigmoid(gate)
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T, conv_state, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    return jnp.zeros((batch, 3 * HEADS * DIM, TAPS - 1)), jnp.zeros((batch, HEADS, DIM, DIM))
