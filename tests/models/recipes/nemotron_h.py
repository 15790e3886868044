"""Nemotron-H: Mamba-2 with a least step size."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm

from ejkernel.modules import causal_conv1d, state_space_v2

SOURCE = "nemotron_h.NemotronHMamba2Mixer"
CHANNELS, HEADS, GROUPS, STATES, TAPS = 32, 4, 2, 4, 4
LEAST_STEP = 0.4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    gate, hidden, dt = jnp.split(x @ w["in_proj.weight"].T, [CHANNELS, 2 * CHANNELS + 2 * GROUPS * STATES], axis=-1)
    taps, bias = w["conv1d.weight"][:, 0], w["conv1d.bias"]
    hidden, conv_state = causal_conv1d(hidden, taps, bias, conv_state, cu_seqlens, activation="silu", return_state=True)
    hidden, write, read = jnp.split(hidden, [CHANNELS, CHANNELS + GROUPS * STATES], axis=-1)
    hidden = hidden.reshape(*x.shape[:2], HEADS, -1)
    write, read = (piece.reshape(*x.shape[:2], GROUPS, STATES) for piece in (write, read))
    dt = jnp.maximum(jax.nn.softplus(dt + w["dt_bias"]), LEAST_STEP)
    output, state, _ = state_space_v2(
        hidden, -jnp.exp(w["A_log"]), write, read, w["D"], dt, initial_state=state, cu_seqlens=cu_seqlens
    )
    output = (output * jax.nn.silu(gate)).reshape(*x.shape[:2], GROUPS, -1)
    output = rms_norm(output, w["norm.weight"].reshape(GROUPS, -1), 1e-5).reshape(*x.shape[:2], CHANNELS)
    return output @ w["out_proj.weight"].T, conv_state, state


def prefill(w, x):
    return mix(w, x)[0]


def packed(w, x, cu_seqlens):
    return mix(w, x, cu_seqlens=cu_seqlens)[0]


def empty_cache(batch, tokens):
    channels = CHANNELS + 2 * GROUPS * STATES
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, HEADS, CHANNELS // HEADS, STATES))


def decode(w, x, cache, position):
    output, *cache = mix(w, x, *cache)
    return output, tuple(cache)
